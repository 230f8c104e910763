"""Selects the checks of doctor: all, some by name, or all except some."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True)
class CheckChoice:
    """The selection. Checks outside it do not run."""

    only: frozenset[str] = frozenset()  # empty: all
    skip: frozenset[str] = frozenset()
    devices: tuple[int, ...] | None = None  # the GPUs to judge and test; None: all

    def __contains__(self, name: str) -> bool:
        return name not in self.skip and (not self.only or name in self.only)

    def require_known(self, names: Iterable[str]) -> None:
        """Reject names that are no check, and a choice that leaves none.

        Raises:
            UsageError: With all names.
        """
        known = tuple(names)
        unknown = sorted((self.only | self.skip) - set(known))
        if unknown:
            message = f"a check must be {', '.join(known[:-1])} or {known[-1]}, got `{unknown[0]}`"
            raise UsageError(message, hint="`--only gpu,driver` runs only these two")
        if not any(name in self for name in known):
            message = f"no check is left of --only {','.join(sorted(self.only)) or 'all'} "
            message += f"without --skip {','.join(sorted(self.skip))}"
            raise UsageError(message, hint=f"the checks are {', '.join(known)}")

    def to_json(self) -> dict[str, Any]:
        """Return the choice as plain data."""
        return {
            "only": sorted(self.only) or None,
            "skip": sorted(self.skip),
            "devices": None if self.devices is None else list(self.devices),
        }


EVERYTHING = CheckChoice()
