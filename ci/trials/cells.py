"""What install_test tries, one thing at a time, and how each came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.targets.gpus import SOLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Outcome = Literal["ok", "FAIL", "NOT RUN"]

GPUS: Final = tuple(map(str, SOLD))  # those that everything is tried for
MIXED: Final = ("7.5,8.6", "7.5,9.0", "9.0,12.0")  # machines with several

OUTCOMES: Final[tuple[Outcome, ...]] = ("ok", "FAIL", "NOT RUN")


class InstallError(FlashDistError):
    """An install came out otherwise than it must."""


class NotRunError(FlashDistError):
    """Something cannot be tried on this machine."""


@dataclass(frozen=True)
class Cell:
    """One thing that was tried."""

    client: str
    what: str
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.client:<5} {self.what:<40} {self.outcome:<8} {self.detail}".rstrip()


def attempt(client: str, what: str, action: Callable[[], str]) -> Cell:
    """Try one thing, which returns a detail or raises."""
    try:
        return Cell(client, what, "ok", action())
    except NotRunError as error:
        return Cell(client, what, "NOT RUN", str(error))
    except (FlashDistError, OSError) as error:
        return Cell(client, what, "FAIL", str(error))


def count(cells: Iterable[Cell]) -> dict[Outcome, int]:
    """Return how many cells came out how."""
    found = [cell.outcome for cell in cells]
    return {outcome: found.count(outcome) for outcome in OUTCOMES}
