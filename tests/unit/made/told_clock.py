"""A clock with a given duration of each attention, on any device.

The measured times then depend on the runs only, not on other work of the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from flash_dist.bench.measuring import passes
from tests.unit.made.host_clock import HostClock

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from flash_dist.bench.measuring.clocks import Mark, Milliseconds, Run

SHORT_MS: Final = 0.125  # below 0.3 ms, so that graphs with 1 ms of work are replayed
LONG_MS: Final = 0.5


class ToldMark:
    """A moment of the device, with the amount of attention launched before it."""

    def __init__(self, mark: Mark, milliseconds: float) -> None:
        self.mark = mark
        self.milliseconds = milliseconds

    def synchronize(self) -> None:
        """Wait for the device."""
        self.mark.synchronize()

    def elapsed_time(self, later: ToldMark) -> float:
        """Return the difference of the told times."""
        if self.mark.elapsed_time(later.mark) < 0:
            raise ValueError(later)
        return later.milliseconds - self.milliseconds


class Told:
    """Mixin that sets the time of a device clock; put it before the clock's class."""

    captures = True
    milliseconds = SHORT_MS
    attentions = 0  # launched so far; a graph counts with each replay

    def counted(self, make: Callable[..., Run]) -> Callable[..., Run]:
        """Return a function that makes counted runs."""

        def make_counted(*args: Any, **options: Any) -> Run:  # noqa: ANN401 - of make
            run = make(*args, **options)

            def launch() -> object:
                self.attentions += 1
                return run()

            return launch

        return make_counted

    def start(self, run: Run, *, cold: bool, cover_us: float) -> Milliseconds:
        """Launch a run on the device."""
        before = self.attentions
        took = self._device.start(run, cold=cold, cover_us=cover_us)
        launched = self.attentions - before

        def read() -> float:
            took()
            return launched * self.milliseconds

        return read

    def mark(self) -> Mark:
        """Remember this moment."""
        return ToldMark(self._device.mark(), self.attentions * self.milliseconds)

    def capture(self, make: Callable[[], Run], repeats: int) -> Run:
        """Capture the run on the device."""
        replay = self._device.capture(make, repeats)

        def launch() -> object:
            before = self.attentions
            result = replay()
            self.attentions = before + repeats  # a CPU launches each attention again
            return result

        return launch

    @property
    def _device(self) -> Any:  # noqa: ANN401 - the next class
        return super()


class ToldHostClock(Told, HostClock):
    """The clock of the CPU, with given durations."""


def tell(monkeypatch: pytest.MonkeyPatch, clock: Told, milliseconds: float) -> None:
    """Set the duration of each attention, and count the measured runs."""
    clock.milliseconds = milliseconds
    for name in ("make_run", "make_copy"):
        monkeypatch.setattr(passes, name, clock.counted(getattr(passes, name)))
