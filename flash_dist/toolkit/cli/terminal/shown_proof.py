"""A proof that shows the progress of its selftests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...doctor.proof import Proof
from .progress import Seldom, working

if TYPE_CHECKING:
    from ...findings.result import CheckResult
    from ...machine.libcuda import Gpu
    from ...selftest.side_by_side import Progress


class ShownProof(Proof):
    """Shows that GPUs are at work: continuously on a terminal, elsewhere a line a minute.

    Args:
        arguments: Those of a proof.
        silent: Print nothing, as for JSON.
        options: Those of a proof.
    """

    def __init__(self, *arguments: Any, silent: bool = False, **options: Any) -> None:  # noqa: ANN401
        super().__init__(*arguments, **options)
        self._silent = silent
        self._seldom = Seldom()

    def run(self, gpu: Gpu) -> CheckResult:
        """Run the selftest of a GPU."""
        if self._silent:
            return super().run(gpu)
        together = self.together
        names = together.names if together else (str(gpu.index),)
        what = f"selftest of gpu{'s' if len(names) > 1 else ''} {', '.join(names)}"
        with working(what, elsewhere=self._seldom.say) as say:

            def show(progress: Progress) -> None:
                say(f"{what}: {progress}")

            if together:
                together.show = show
            return super().run(gpu)
