"""What a conda package says of a wheel: build string, dependencies, GPUs. Pure functions.

The arch set is chosen by the solver. `__cuda_arch` (CEP 46) is the *lowest* compute capability of
the machine, so a package can promise that this GPU is served and nothing about the others:

- Its range is derived from the targets that are really embedded, and ends where the code ends.
- It is a constraint, not a dependency: clients that do not know `__cuda_arch` can install, too.
- Where several packages fit, the highest build number wins. Sets that serve more GPUs have higher
  ones; the pick of `archsets.json`, which serves every GPU that any set serves, has the highest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from ci.wheels.artefacts import ArtefactError
from flash_dist.builds.declared import declare_build
from flash_dist.indexes.index import PROJECT
from flash_dist.targets.compatibility import Origin, driver_refusal, judge
from flash_dist.targets.devices import (
    DRIVER_CUDA,
    KNOWN_DEVICES,
    Device,
    Driver,
    format_version,
    parse_version,
)
from flash_dist.targets.verdict import FLOOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from packaging.requirements import Requirement
    from packaging.specifiers import Specifier, SpecifierSet

    from ci.wheels.artefacts import Artefact
    from flash_dist.builds.manifest import Manifest
    from flash_dist.builds.metadata import Metadata
    from flash_dist.targets.archs import Arch, ArchSet

PICK: Final = "conda"  # who asks in the table `picks`
SUBDIRS: Final = {"x86_64": "linux-64", "aarch64": "linux-aarch64"}
_TAG: Final = re.compile(r"cp3[0-9]+-abi3-manylinux_([0-9]+)_([0-9]+)_([a-z0-9_]+)")
# What conda-forge calls them.
_RENAMED: Final = {"torch": "pytorch", "nvidia-cuda-runtime-cu12": "cuda-cudart"}

# A package for all Pythons has no markers: what some Pythons need is demanded for all or for none.
# These are demanded for all. conda-forge and Anaconda's own channel have them for every Python,
# and empty where the standard library took over (the recipes of backports.zstd say so of 3.14).
_EMPTY_WHERE_NOT_NEEDED: Final = frozenset({"backports.zstd"})
_PYTHONS: Final = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
_SAME_IN_CONDA: Final = frozenset({">=", "<=", ">", "<", "!=", "==", "~="})

_NEWEST: Final = Device(99, 9)  # what no GPU has: code that runs there runs on whatever comes
_GRID: Final = tuple(
    device
    for major in range(FLOOR.major, _NEWEST.major + 1)
    for device in (Device(major, minor) for minor in range(10))
    if device >= FLOOR
)


@dataclass(frozen=True)
class Recipe:
    """What the solver reads of one package."""

    version: str
    build: str
    build_number: int
    subdir: str
    depends: tuple[str, ...]
    constrains: tuple[str, ...]

    @property
    def path(self) -> str:
        """Where it lies in the channel."""
        return f"{self.subdir}/{PROJECT}-{self.version}-{self.build}.conda"

    def to_json(self) -> dict[str, Any]:
        """Return what index.json has to say."""
        return {
            "name": PROJECT,
            "version": self.version,
            "build": self.build,
            "build_number": self.build_number,
            "subdir": self.subdir,
            "noarch": "python",
            "depends": list(self.depends),
            "constrains": list(self.constrains),
        }


def make_recipe(one: Artefact, archsets: Mapping[str, ArchSet], pick: ArchSet) -> Recipe:
    """Describe a wheel to the solver.

    Args:
        one: The wheel.
        archsets: The published sets for CPUs of its kind.
        pick: The one for those who do not choose.

    Raises:
        FlashDistError: The wheel says something that conda cannot.
    """
    label, toolkit = one.manifest.arch_set.label, one.manifest.toolkit.cuda
    machine, glibc = _read_tags(one)
    number = rank_set(label, toolkit, archsets.values(), pick)
    name = f"cuda{toolkit.replace('.', '')}_{label.replace('.', '_')}_abi3_{number}"
    depends = (
        *map_dependencies(one.metadata, machine),
        f"__glibc >={glibc}",
        f"__cuda >={oldest_cuda(one.manifest)}",
    )
    constraint = f"__cuda_arch {constrain_gpus(one.embedded)}"
    return Recipe(one.version.public, name, number, SUBDIRS[machine], depends, (constraint,))


def _read_tags(one: Artefact) -> tuple[str, str]:
    """Return the machine and the oldest glibc of the wheel's tags."""
    found = [match for match in map(_TAG.fullmatch, one.tags) if match and match[3] in SUBDIRS]
    if len({match[3] for match in found}) != 1:
        message = (
            f"a conda package is made of a wheel tagged cp3x-abi3-manylinux_*_* of "
            f"{' or '.join(SUBDIRS)}, `{one.file_name}` has {', '.join(one.tags)}"
        )
        raise ArtefactError(message, hint="`nox -s build_wheels` makes them")
    glibc = min((int(match[1]), int(match[2])) for match in found)
    return found[0][3], format_version(glibc)


def rank_set(label: str, toolkit: str, archsets: Iterable[ArchSet], pick: ArchSet) -> int:
    """Return the build number of a set: 1 and up, and 0 for one that is not published.

    The pick is first; then what serves more of the known GPUs; then the newer toolkit.
    """

    def breadth(one: ArchSet) -> tuple[bool, int, tuple[int, int], str]:
        served = sum(is_served(one.archs, device) for device in KNOWN_DEVICES)
        return one.name == pick.name, served, parse_version(one.toolkit), one.label

    ranked = [(one.label, one.toolkit) for one in sorted(archsets, key=breadth)]
    return ranked.index((label, toolkit)) + 1 if (label, toolkit) in ranked else 0


def is_served(archs: Iterable[Arch], device: Device) -> bool:
    """Whether code for one of these targets is promised to run on a GPU."""
    return device >= FLOOR and any(judge(arch, device) for arch in archs)


def constrain_gpus(archs: Iterable[Arch]) -> str:
    """Return the compute capabilities that some targets serve: `>=10.0,<11.0a0|>=12.0`.

    Raises:
        ArtefactError: They serve none.
    """
    targets = tuple(archs)
    parts = []
    for served, run in groupby(_GRID, key=lambda device: is_served(targets, device)):
        devices = list(run)
        if served:
            end = "" if devices[-1] == _NEWEST else f",<{_next(devices[-1])}a0"
            parts.append(f">={devices[0]}{end}")
    if not parts:
        message = f"no GPU is served by {', '.join(map(str, targets)) or 'no code at all'}"
        raise ArtefactError(message)
    return "|".join(parts)


def _next(device: Device) -> Device:
    return _GRID[_GRID.index(device) + 1]


def oldest_cuda(manifest: Manifest) -> str:
    """Return the CUDA version of the oldest driver that loads the code: `13.0`.

    It is what machine code needs. PTX of a later minor needs a newer driver; which GPUs run PTX
    no constraint of conda can say, and doctor does.
    """
    origins = {one.origin for one in declare_build(manifest).variants}
    origins = origins or {Origin(manifest.toolkit.cuda)}
    declared = Driver.parse(manifest.toolkit.driver_min).cuda
    for cuda in sorted(DRIVER_CUDA.values()):
        driver = Driver(cuda)
        if cuda >= declared and not any(driver_refusal(driver, origin) for origin in origins):
            return format_version(cuda)
    message = f"no known driver loads code of CUDA {manifest.toolkit.cuda}"
    raise ArtefactError(message)


def map_dependencies(metadata: Metadata, machine: str) -> tuple[str, ...]:
    """Return what METADATA requires, as conda names it.

    Raises:
        ArtefactError: It requires something that conda cannot say.
    """
    pythons = metadata.python
    if not pythons:
        message = "METADATA does not say which Pythons it is for (Requires-Python)"
        raise ArtefactError(message)
    found = [_name_conda("python", pythons)]
    for requirement in metadata.requirements:
        if _is_needed(requirement, pythons, machine):
            name = _RENAMED.get(requirement.name, requirement.name.lower())
            found.append(_name_conda(name, requirement.specifier))
    return tuple(found)


def _is_needed(requirement: Requirement, pythons: SpecifierSet, machine: str) -> bool:
    if requirement.url or requirement.extras:
        message = f"conda has no word for the dependency `{requirement}`"
        raise ArtefactError(message, hint="a dependency is a name and versions")
    if requirement.marker is None:
        return True
    fitting = [python for python in _PYTHONS if pythons.contains(f"{python}.0")]
    needing = [
        python
        for python in fitting
        if requirement.marker.evaluate(_imagine_python(python, machine))
    ]
    if needing and needing != fitting and requirement.name not in _EMPTY_WHERE_NOT_NEEDED:
        message = (
            f"one conda package serves Python {', '.join(fitting)}, and `{requirement}` is for "
            f"{', '.join(needing)} alone"
        )
        hint = "ci/conda/recipe.py lists what conda's channels have empty for the others"
        raise ArtefactError(message, hint=hint)
    return bool(needing)


def _imagine_python(version: str, machine: str) -> dict[str, str]:
    """Return what markers ask of a Python without extras on Linux."""
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
        raise ArtefactError(message)
    is_prefix = specifier.operator == "==" and specifier.version.endswith(".*")
    return specifier.version if is_prefix else str(specifier)
