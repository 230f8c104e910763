"""Fallbacks: kernels for calls that other kernels do not support, as stated in a manifest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Fallbacks:
    """Fallback roles, and families that leave calls to the general family of their role.

    The table of kernels states them. The generator copies them to the C++ code and the manifest.
    """

    # By role: other roles, whose kernels serve the calls that the kernels of this role do not
    # support.
    stand_ins: Mapping[str, tuple[str, ...]] = field(hash=False)
    # Families that leave a call to the general family if the call's first size, such as head_dim,
    # is at most half of the kernel's.
    leaves_half_filled: frozenset[str]

    @classmethod
    def infer(cls, roles: Mapping[str, str]) -> Fallbacks:
        """Return the fallbacks of a build whose manifest is absent, or does not state fallbacks.

        A role without a general family has unknown fallbacks, (). Families for some targets count
        as `leaves_half_filled`, if their role has a general family.

        Args:
            roles: The role of each family.
        """
        alone = set(roles.values()) - roles.keys()
        leaving = (family for family, role in roles.items() if role not in {family, *alone})
        return cls(dict.fromkeys(sorted(alone), ()), frozenset(leaving))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fallbacks:
        """Read the fallbacks from plain data.

        Raises:
            TypeError: A value is not a list of names, or a role has no fallback.
        """
        stand_ins = {role: read_names(role, names) for role, names in data["stand_ins"].items()}
        key = "leaves_half_filled"
        if not all(stand_ins.values()):
            message = "`stand_ins` must name at least one role for each, got none"
            raise TypeError(message)
        return cls(stand_ins, frozenset(read_names(key, data[key])))

    def to_json(self) -> dict[str, Any]:
        """Return the fallbacks as plain data."""
        return {
            "stand_ins": {role: list(names) for role, names in self.stand_ins.items()},
            "leaves_half_filled": sorted(self.leaves_half_filled),
        }


def read_names(key: str, names: object) -> tuple[str, ...]:
    """Check that a value read from JSON is a list of names, and return it as a tuple.

    Raises:
        TypeError: The value is not a list of names. The message names its key.
    """
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        message = f"`{key}` must be a list of names, got {names!r:.60}"
        raise TypeError(message)
    return tuple(names)
