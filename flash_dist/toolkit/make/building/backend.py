"""Build backend of `pip install .`: setuptools between a preflight check and an audit.

pip and uv run it in an isolated environment (PEP 517). The hooks request from PyPI only the
packages that this machine and the targets need. They report a missing compiler before any download.
The wheel passes the same audit as wheels of `nox -s build_wheels`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import KernelsError
from ...product import NAME
from ...targets.wording import format_size
from ..command import told_in_a_sentence
from ..project import (
    BUILD_FOLDER,
    ROOT,
    TEMPORARY,
    build_folder,
    can_read_toml,
    load_project,
    load_requirements,
    read_report,
)
from ..toolchain.nvcc import find_toolchain, keep_toolkit, named_home, wheels_of_toolkit
from .plan import check_sources, make_plan, plan_this_build, run_preflight

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Settings = Mapping[str, Any] | None

UNFINISHED: Final = "unfinished"  # `-C unfinished=true`: the caller repairs and audits the wheel
BY_PIP: Final = "PIP_BUILD_TRACKER"  # a variable that pip sets for its builds


class BackendError(KernelsError):
    """The build backend refuses a request, or lacks a package that it needs."""


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """Return the requirements for compiling.

    Unless `unfinished` is set, check this machine and the targets. The requirements then include
    torch if its headers are found nowhere else, and a CUDA toolkit if CUDA_HOME names none.
    """
    needed = load_requirements("backend")
    if _unfinished(config_settings):
        return needed
    with told_in_a_sentence():
        print(run_preflight(os.environ))
        plan = make_plan(os.environ)
        if can_read_toml():
            plan = check_sources(plan)
            needed += _list_headers()
        print(plan, flush=True)
        if named_home(os.environ) is None:
            needed.append(wheels_of_toolkit(plan.toolkit))
    return needed


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    """Return the requirements for packing the sources."""
    del config_settings
    return load_requirements("backend")


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    """Return the requirements that `uv lock` asks for; if pip asks, end with an error."""
    if BY_PIP in os.environ:  # fail before pip downloads the dependencies, including torch
        build_editable("", config_settings)
    return load_requirements("backend")


def build_editable(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Refuse an editable install, which would need compiled libraries in the source folder."""
    del wheel_directory, config_settings, metadata_directory
    with told_in_a_sentence():
        message = f"{NAME} is not installed in editable mode: its libraries are compiled"
        hint = "`pip install .` or `uv sync --no-editable` installs a copy; build/ keeps objects"
        raise BackendError(message, hint=hint)


def prepare_metadata_for_build_wheel(
    metadata_directory: str, config_settings: Settings = None
) -> str:
    """Write the wheel's metadata without compiling, and return the name of its folder."""
    labelled = _is_labelled(config_settings)
    with told_in_a_sentence():
        pack = _load_pack()
    pack("dist_info", "--output-dir", metadata_directory, labelled=labelled)
    (made,) = Path(metadata_directory).glob("*.dist-info")
    return made.name


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    """Pack the sources into an sdist: the same sources give the same bytes."""
    from .sdist import normalise  # noqa: PLC0415 - only this hook needs it

    del config_settings
    with told_in_a_sentence():
        epoch = int(load_project().epoch)
        made = _pack(Path(sdist_directory), "sdist", "--formats", "gztar")
        normalise(made, epoch)
    return made.name


def build_wheel(
    wheel_directory: str,
    config_settings: Settings = None,
    metadata_directory: str | None = None,
) -> str:
    """Compile one wheel; unless `unfinished`, set its platform tag and audit it."""
    del metadata_directory  # packing writes the metadata again
    if _unfinished(config_settings):
        return _pack(Path(wheel_directory), "bdist_wheel").name
    with told_in_a_sentence():
        return _build_finished(Path(wheel_directory), labelled=_is_labelled(config_settings)).name


def _is_labelled(config_settings: Settings) -> bool:
    """Tell if the version of a wheel has the label of its arch set.

    A finished wheel built from an sdist keeps the version of the sdist: pip and `uv build` accept
    no other version.
    """
    return _unfinished(config_settings) or not (ROOT / "PKG-INFO").is_file()


def _pack(target: Path, *words: str, labelled: bool = True) -> Path:
    """Let setuptools make one file, and move it to `target` when it is complete."""
    pack = _load_pack()
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".part-", dir=target) as folder:
        pack(*words, "--dist-dir", folder, labelled=labelled)
        (made,) = Path(folder).iterdir()
        return made.replace(target / made.name)


def _load_pack() -> Callable[..., object]:
    """Import `pack`, which needs the packages that `get_requires_for_build_wheel` lists.

    Raises:
        BackendError: One of these packages is not installed.
    """
    try:
        from .pack import pack  # noqa: PLC0415 - setuptools may be absent before get_requires
    except ModuleNotFoundError as error:
        message = f"the build needs the module `{error.name}`, which this Python does not have"
        raise BackendError(message, hint="leave `--no-build-isolation` out") from error
    return pack


def _build_finished(target: Path, *, labelled: bool) -> Path:
    from ..wheels.gates import audit, repair  # noqa: PLC0415 - the requirements are installed by now

    start = time.monotonic()
    settle_environment()
    plan = plan_this_build()
    print(plan, flush=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        raw = _pack(Path(folder) / "raw", "bdist_wheel", labelled=labelled)
        wheel = repair(raw, os.environ, Path(folder) / "repaired")
        audit(wheel, plan.archset)
        finished = Path(shutil.move(wheel, target / wheel.name))
    objects = read_report(plan.archset.label)
    size = format_size(finished.stat().st_size)
    print(f"{objects}; {size} in {time.monotonic() - start:.0f} s: {finished.name}")
    return finished


def settle_environment() -> None:
    """Set SOURCE_DATE_EPOCH and the variable of the build folder; also CUDA_HOME, if it is unset.

    pip makes an isolated environment at another path for every build. Objects depend on the path of
    nvcc, so CUDA_HOME is set to a copy of the toolkit in the build folder.
    """
    os.environ["SOURCE_DATE_EPOCH"] = load_project().epoch
    os.environ[BUILD_FOLDER] = str(_objects_folder())
    if named_home(os.environ) is None:
        os.environ["CUDA_HOME"] = str(keep_toolkit(find_toolchain().home, build_folder()))


def _list_headers() -> list[str]:
    """Return torch as a requirement, or an empty list if its headers are found elsewhere."""
    from ..toolchain.torch_headers import FOLDER, list_needed  # noqa: PLC0415 - needs a TOML reader

    return list_needed(_objects_folder() / FOLDER)


def _objects_folder() -> Path:
    """Return the build folder of builds that a frontend such as pip starts."""
    return Path(os.environ.get(BUILD_FOLDER) or ROOT / "build" / "pip")


def _unfinished(config_settings: Settings) -> bool:
    return bool((config_settings or {}).get(UNFINISHED))
