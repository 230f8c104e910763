"""Conda metadata of a wheel: build string, dependencies, GPUs. Pure functions.

The solver chooses the arch set. `__cuda_arch` (CEP 46) is the *lowest* compute capability of the
machine, so a package can guarantee code for that GPU, but nothing about the other GPUs:

- A package's range of `__cuda_arch` covers exactly the GPUs that its embedded targets run on.
- The range is a constraint, not a dependency: clients without `__cuda_arch` can install it, too.
- Where several packages fit, the highest build number wins. Sets that serve more GPUs have higher
  numbers. The pick of `archsets.json` serves every GPU that any set serves; its number is highest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...builds.conda_solver import (
    SUBDIRS,
    constrain_gpus,
    is_served,
    list_dependencies,
    name_build,
    read_platform,
)
from ...indexes.index import PROJECT
from ...targets.devices import KNOWN_DEVICES, parse_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ...targets.archs import ArchSet
    from ..wheels.artefacts import Artefact

PICK: Final = "conda"  # name of the client whose set is picked, see `load_picks`


@dataclass(frozen=True)
class Recipe:
    """The metadata of one package that the solver reads."""

    version: str
    build: str
    build_number: int
    subdir: str
    depends: tuple[str, ...]
    constrains: tuple[str, ...]

    @property
    def path(self) -> str:
        """The path of the package in the channel."""
        return f"{self.subdir}/{PROJECT}-{self.version}-{self.build}.conda"

    def to_json(self) -> dict[str, Any]:
        """Return the fields of index.json that the solver reads."""
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
    """Describe a wheel for the solver.

    Args:
        one: The wheel.
        archsets: The published sets for the wheel's kind of CPU.
        pick: The set for clients that do not choose.

    Raises:
        KernelsError: conda cannot express the wheel's metadata.
    """
    label, toolkit = one.manifest.arch_set.label, one.manifest.toolkit.cuda
    machine, glibc = read_platform(one.file_name, one.tags)
    number = rank_set(label, toolkit, archsets.values(), pick)
    name = name_build(label, toolkit, number)
    depends = tuple(list_dependencies(one.metadata, one.manifest, machine, glibc))
    constraint = f"__cuda_arch {constrain_gpus(one.embedded)}"
    return Recipe(one.version.public, name, number, SUBDIRS[machine], depends, (constraint,))


def rank_set(label: str, toolkit: str, archsets: Iterable[ArchSet], pick: ArchSet) -> int:
    """Return the build number of a set: 1 or more, or 0 if the set is not published.

    The pick has the highest number. Of two other sets, the one that serves more known GPUs has the
    higher number. If both serve equally many, the one with the newer toolkit does.
    """

    def breadth(one: ArchSet) -> tuple[bool, int, tuple[int, int], str]:
        served = sum(is_served(one.archs, device) for device in KNOWN_DEVICES)
        return one.name == pick.name, served, parse_version(one.toolkit), one.label

    ranked = [(one.label, one.toolkit) for one in sorted(archsets, key=breadth)]
    return ranked.index((label, toolkit)) + 1 if (label, toolkit) in ranked else 0
