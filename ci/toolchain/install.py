"""Bring a CUDA toolkit, once, with whatever installs packages there: nox, or pip in a container."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ci.project import make_once
from ci.toolchain.cross import assemble_home
from ci.toolchain.cuda12 import CUDA as CUDA_12
from ci.toolchain.cuda12 import PACKAGES, bring_toolkit
from ci.toolchain.nvcc import complete_links

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ci.toolchain.cross import Target


def install_toolkit(
    cuda: str,
    folder: Path,
    install: Callable[..., object],
    target: Target | None = None,
    options: tuple[str, ...] = (),
) -> Path:
    """Return the CUDA_HOME of a toolkit, which is installed unless it is there.

    Args:
        cuda: Its version, such as `13.0`.
        folder: Where it lies; what is there without being whole goes.
        install: Called with a folder and the words of an installer for packages into it.
        target: Another CPU that it compiles for; its parts come beside the toolkit.
        options: What lets the installer take packages for that CPU.

    Raises:
        FlashDistError: It cannot be brought.
    """
    own = _install_own(cuda, folder, install)
    if target is None:
        return own
    parts = folder.with_name(f"{folder.name}-{target.machine}")
    home = parts / "nvidia" / "cu13"
    with make_once(parts) as missing:
        if missing:
            install(parts, *options, f"cuda-toolkit[cudart,crt,cccl]=={cuda}.*")
            assemble_home(own, home, target)
    return home


def _install_own(cuda: str, folder: Path, install: Callable[..., object]) -> Path:
    home = folder / "home" if cuda == CUDA_12 else folder / "nvidia" / "cu13"
    with make_once(folder) as missing:
        if missing and cuda == CUDA_12:
            for name, packages in PACKAGES.items():
                install(folder / name, "--no-deps", *packages)
            print(bring_toolkit(folder, home), flush=True)
        elif missing:
            install(folder, f"cuda-toolkit[nvcc,cccl]=={cuda}.*")
            complete_links(home)
    return home
