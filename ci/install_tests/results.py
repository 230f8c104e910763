"""Results of install_test: one per tested item."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from flash_dist.errors import FlashDistError
from flash_dist.toolkit.targets.gpus import SOLD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Outcome = Literal["ok", "FAIL", "NOT RUN"]

GPUS: Final = tuple(map(str, SOLD))  # compute capabilities; every client is tested with each
MIXED: Final = ("7.5,8.6", "7.5,9.0", "9.0,12.0")  # machines with several GPUs

OUTCOMES: Final[tuple[Outcome, ...]] = ("ok", "FAIL", "NOT RUN")


class InstallError(FlashDistError):
    """An install has a wrong result."""


class NotRunError(FlashDistError):
    """A test cannot run on this machine."""


@dataclass(frozen=True)
class Result:
    """The result of one test with one client."""

    client: str
    what: str
    outcome: Outcome
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.client:<5} {self.what:<40} {self.outcome:<8} {self.detail}".rstrip()


def attempt(client: str, what: str, action: Callable[[], str]) -> Result:
    """Run one test, a function that returns a detail or raises an error."""
    try:
        return Result(client, what, "ok", action())
    except NotRunError as error:
        return Result(client, what, "NOT RUN", str(error))
    except (FlashDistError, OSError) as error:
        return Result(client, what, "FAIL", str(error))


def count(results: Iterable[Result]) -> dict[Outcome, int]:
    """Count the results by outcome."""
    found = [result.outcome for result in results]
    return {outcome: found.count(outcome) for outcome in OUTCOMES}
