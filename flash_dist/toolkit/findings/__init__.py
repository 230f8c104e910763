"""Every finding id as data: its meaning and its remedy.

To add an id, add an entry to the module of its subject, and import it where the check is; the name
of its constant becomes the id. Nothing else changes: `explain ID`, the HTML report, the hint after
a fix and the page `findings.html` of the documentation read the entries. product.json has the
findings of the package's own variables.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from . import (
    audits,
    driver,
    gpus,
    host,
    install,
    libraries,
    loading,
    own_sources,
    proofs,
    verifications,
)
from .entry import Entry
from .said import (
    attention,
    building,
    faults,
    frameworks,
    gpu_code,
    installing,
    linking,
    packages,
    starting,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

__all__ = ["FINDINGS", "SUBJECTS", "Entry", "find_code"]


def _name_entries(module: ModuleType) -> dict[str, Entry]:
    """Set the id of each entry of a module (`no-gpu` for NO_GPU), and return the entries by id."""
    found: dict[str, Entry] = {}
    for constant, value in vars(module).items():
        if isinstance(value, Entry):
            object.__setattr__(value, "id", constant.lower().replace("_", "-"))
            found[value.id] = value
    return found | {one.id: one for one in vars(module).get("OWN_VARIABLES", ())}


SUBJECTS: Final[tuple[tuple[str, Mapping[str, Entry]], ...]] = (
    ("This package", _name_entries(own_sources)),
    ("The install", _name_entries(install)),
    ("Loading", _name_entries(loading)),
    ("The driver and its variables", _name_entries(driver)),
    ("Containers, WSL, MIG, hidden GPUs and the JIT's cache", _name_entries(host)),
    ("GPUs and this build", _name_entries(gpus)),
    ("Other libraries", _name_entries(libraries)),
    ("The selftest", _name_entries(proofs)),
    ("Audits", _name_entries(audits)),
    ("Verifications", _name_entries(verifications)),
    ("CUDA that does not start", _name_entries(starting)),
    ("GPU code that does not run", _name_entries(gpu_code)),
    ("Calls that fail on the GPU", _name_entries(faults)),
    ("Attention of any package", _name_entries(attention)),
    ("torch, Triton and CUDA's libraries", _name_entries(frameworks)),
    ("The dynamic loader", _name_entries(linking)),
    ("Missing packages", _name_entries(packages)),
    ("Compiling packages", _name_entries(building)),
    ("pip, uv and conda", _name_entries(installing)),
)

FINDINGS: Final[Mapping[str, Entry]] = {
    name: entry for _, entries in SUBJECTS for name, entry in entries.items()
}

_OF_CODES: Final[Mapping[int, Entry]] = {
    code: entry for entry in FINDINGS.values() for code in entry.codes
}


def find_code(number: int) -> Entry:
    """Return the entry of a CUDA error code; the general entry if the code has none of its own."""
    return _OF_CODES.get(number, faults.CUDA_ERROR)
