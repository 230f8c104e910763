"""Metadata of a wheel for conda's solver: GPUs, driver, glibc, dependencies. Pure functions.

`make/conda/recipe.py` writes the metadata into packages; `verify` compares packages with it.
"""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING, Final

from ..errors import AuditError, hint_to_build
from ..targets.compatibility import Origin, driver_refusal, judge
from ..targets.devices import DRIVER_CUDA, Device, Driver, format_version
from ..targets.verdict import FLOOR
from .manifest import Manifest, declare_build

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.requirements import Requirement
    from packaging.specifiers import Specifier, SpecifierSet

    from ..targets.archs import Arch
    from .metadata import Metadata

SUBDIRS: Final = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}
_HINT: Final = hint_to_build("`nox -s build_wheels` makes them", "name one that was released")
_TAG: Final = re.compile(r"py3-none-manylinux_([0-9]{1,4})_([0-9]{1,4})_([a-z0-9_]+)")
# Packages with another name on conda-forge.
_RENAMED: Final = {"torch": "pytorch", "nvidia-cuda-runtime-cu12": "cuda-cudart"}

# A noarch package has no environment markers: a dependency that only some Pythons need is required
# for all Pythons or for none. These packages are required for all. conda-forge and Anaconda's
# channel have them for every Python, empty where the standard library has replaced them (see the
# recipe of backports.zstd for 3.14).
_EMPTY_WHERE_NOT_NEEDED: Final = frozenset({"backports.zstd"})
_PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
_SAME_IN_CONDA: Final = frozenset({">=", "<=", ">", "<", "!=", "==", "~="})

# Every compute capability from the lowest supported one to 99.9, which is beyond every GPU. Code
# that serves 99.9 counts as code for all later GPUs.
_GRID: Final = tuple(Device(*divmod(number, 10)) for number in range(FLOOR.number, 1000))


def read_platform(file_name: str, tags: Iterable[str]) -> tuple[str, str]:
    """Return the machine and the lowest glibc version in the tags of a wheel.

    Raises:
        AuditError: The tags `py3-none-manylinux_*` name no supported machine, or several.
    """
    told = tuple(tags)
    found = [match for match in map(_TAG.fullmatch, told) if match and match[3] in SUBDIRS]
    if len({match[3] for match in found}) != 1:
        message = (
            f"a conda package is made of a wheel tagged py3-none-manylinux_*_* of "
            f"{' or '.join(SUBDIRS)}, `{file_name}` has {', '.join(told)}"
        )
        raise AuditError(message, hint=_HINT)
    glibc = min((int(match[1]), int(match[2])) for match in found)
    return found[0][3], format_version(glibc)


def is_served(archs: Iterable[Arch], device: Device) -> bool:
    """Tell if code for one of these targets is guaranteed to run on a supported GPU."""
    return device >= FLOOR and any(judge(arch, device) for arch in archs)


def name_build(label: str, toolkit: str, number: int) -> str:
    """Return the build string of a package, such as `cuda130_hopper_2`."""
    return f"cuda{toolkit.replace('.', '')}_{label.replace('.', '_')}_{number}"


def list_dependencies(
    metadata: Metadata, manifest: Manifest, machine: str, glibc: str
) -> list[str]:
    """List all dependencies for index.json.

    Raises:
        AuditError: conda cannot express a dependency, or no known driver loads the code.
    """
    needed = map_dependencies(metadata, machine)
    return [*needed, f"__glibc >={glibc}", f"__cuda >={oldest_cuda(manifest)}"]


def constrain_gpus(archs: Iterable[Arch]) -> str:
    """Return a version constraint for the GPUs that the targets serve: `>=10.0,<11.0a0|>=12.0`.

    Raises:
        AuditError: The targets serve no GPU.
    """
    targets = tuple(archs)
    parts = []
    for served, run in groupby(_GRID, key=lambda device: is_served(targets, device)):
        devices = list(run)
        if served:
            past = _GRID.index(devices[-1]) + 1
            parts.append(f">={devices[0]}" + (f",<{_GRID[past]}a0" if past < len(_GRID) else ""))
    if not parts:
        message = f"no GPU is served by {', '.join(map(str, targets)) or 'no code at all'}"
        raise AuditError(message)
    return "|".join(parts)


def oldest_cuda(manifest: Manifest) -> str:
    """Return the CUDA version of the oldest driver that loads the code, such as `13.0`.

    This driver loads the SASS. The PTX may need a newer one. conda cannot express which GPUs run
    PTX, so `doctor` checks their driver.

    Raises:
        AuditError: No known driver loads the code.
    """
    origins = {one.origin for one in declare_build(manifest).variants}
    origins = origins or {Origin(manifest.toolkit.cuda)}
    declared = Driver.parse(manifest.toolkit.driver_min).cuda
    for cuda in sorted(DRIVER_CUDA.values()):
        driver = Driver(cuda)
        if cuda >= declared and not any(driver_refusal(driver, origin) for origin in origins):
            return format_version(cuda)
    message = f"no known driver loads code of CUDA {manifest.toolkit.cuda}"
    raise AuditError(message)


def map_dependencies(metadata: Metadata, machine: str) -> tuple[str, ...]:
    """Return Python and the other requirements of METADATA, under their conda names.

    Raises:
        AuditError: conda cannot express one of the requirements.
    """
    pythons = metadata.python
    if not pythons:
        message = "METADATA does not say which Pythons it is for (Requires-Python)"
        raise AuditError(message)
    found = [_name_conda("python", pythons)]
    for requirement in metadata.requirements:
        if _is_needed(requirement, pythons, machine):
            name = _RENAMED.get(requirement.name, requirement.name.lower())
            found.append(_name_conda(name, requirement.specifier))
    return tuple(found)


def _is_needed(requirement: Requirement, pythons: SpecifierSet, machine: str) -> bool:
    if requirement.url or requirement.extras:
        message = f"conda has no word for the dependency `{requirement}`"
        raise AuditError(message, hint="a dependency is a name and versions")
    marker = requirement.marker
    if marker is None:
        return True
    fitting = [python for python in _PYTHONS if pythons.contains(f"{python}.0")]
    needing = [one for one in fitting if marker.evaluate(_imagine_python(one, machine))]
    if needing and needing != fitting and requirement.name not in _EMPTY_WHERE_NOT_NEEDED:
        message = (
            f"one conda package serves Python {', '.join(fitting)}, and `{requirement}` is for "
            f"{', '.join(needing)} alone"
        )
        hint = "builds/conda_solver.py lists what conda's channels have empty for the others"
        raise AuditError(message, hint=hint)
    return bool(needing)


def _imagine_python(version: str, machine: str) -> dict[str, str]:
    """Return the values of environment markers for CPython on Linux, without an extra."""
    return {
        "extra": "",
        "implementation_name": "cpython",
        "implementation_version": f"{version}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{version}.0",
        "python_version": version,
        "sys_platform": "linux",
    }


def _name_conda(name: str, specifiers: SpecifierSet) -> str:
    versions = ",".join(sorted(map(_write_specifier, specifiers)))
    return f"{name} {versions}".strip()


def _write_specifier(specifier: Specifier) -> str:
    if specifier.operator not in _SAME_IN_CONDA or "+" in specifier.version:
        message = f"conda has no word for the versions `{specifier}`"
        raise AuditError(message)
    is_prefix = specifier.operator == "==" and specifier.version.endswith(".*")
    return specifier.version if is_prefix else str(specifier)
