"""Installs a CUDA toolkit once, with the available installer: nox, or pip in a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...targets.archs import DEFAULT_TOOLKIT
from ..locks import NOT_COVERED, is_covered, locked
from ..project import load_requirements, make_once
from .cross import assemble_home
from .cuda12 import CUDA as CUDA_12
from .cuda12 import PACKAGES, bring_toolkit
from .nvcc import complete_links

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from .cross import Target


def install_toolkit(
    cuda: str,
    folder: Path,
    install: Callable[..., object],
    target: Target | None = None,
    options: tuple[str, ...] = (),
) -> Path:
    """Return the CUDA_HOME of a toolkit, after installing it if necessary.

    Args:
        cuda: The version of the toolkit, such as `13.0`.
        folder: The folder of the toolkit; an incomplete one is deleted.
        install: Installs packages; called with a folder and the installer's arguments.
        target: Another target CPU; its parts are stored next to the toolkit.
        options: Installer options for packages of that CPU.

    Raises:
        KernelsError: The toolkit cannot be installed.
    """
    own = _install_own(cuda, folder, install)
    if target is None:
        return own
    parts = folder.with_name(f"{folder.name}-{target.machine}")
    home = parts / "nvidia" / "cu13"
    with make_once(parts) as missing:
        if missing:
            install(parts, *options, *_words("nvcc_aarch64", cuda))
            assemble_home(own, home, target)
    return home


def _install_own(cuda: str, folder: Path, install: Callable[..., object]) -> Path:
    home = folder / "home" if cuda == CUDA_12 else folder / "nvidia" / "cu13"
    with make_once(folder) as missing:
        if missing and cuda == CUDA_12:
            for name, group in PACKAGES.items():
                install(folder / name, "--no-deps", *_words(group, cuda))
            print(bring_toolkit(folder, home), flush=True)
        elif missing:
            install(folder, *_words("nvcc", cuda))
            complete_links(home)
    return home


def _words(group: str, cuda: str) -> list[str]:
    """Return the installer's arguments for a group, with hashes if the locks cover this install."""
    wanted = load_requirements(group)
    if cuda in (DEFAULT_TOOLKIT, CUDA_12):
        if is_covered():
            return locked({group: wanted})
        print(f"{NOT_COVERED}: CUDA {cuda} is installed without hashes", flush=True)
        return wanted
    print(f"CUDA {cuda} is not locked: it is installed without hashes", flush=True)
    return [one.replace(f"=={DEFAULT_TOOLKIT}.", f"=={cuda}.") for one in wanted]
