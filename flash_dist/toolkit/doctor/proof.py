"""Runs the selftest on GPUs, and compares the bits of GPUs with each other and with records."""

from __future__ import annotations

from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks.environment import find_situation, judge_gpu
from ..errors import KernelsError
from ..findings.loading import LOAD_PREDICTION_DIFFERS
from ..findings.proofs import FINGERPRINT_DIFFERS, GPUS_DIFFER, SELFTEST_CRASHED, SELFTEST_ERROR
from ..findings.result import CheckResult
from ..gpucode.kernel_code import read_code_hashes
from ..product import PRODUCT, PROGRAM
from ..selftest.fingerprints import (
    Agreement,
    Fingerprint,
    Mismatch,
    Reference,
    Setting,
    compare_prints,
    compare_with,
    make_fingerprints,
    read_references,
)
from ..selftest.run import CHILD, check_selftest, find_surprises, make_command, run_selftest
from ..selftest.side_by_side import SideBySide
from ..targets.archs import DEFAULT_TOOLKIT
from ..targets.axes import is_plain, name_kernel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from ..checks.environment import Environment
    from ..loading.parts import Loading
    from ..machine.libcuda import Gpu
    from ..selftest.report import SelftestReport

    Working = Callable[[str], AbstractContextManager[Callable[[str], None]]]


class Proof:
    """Runs the selftest on GPUs and keeps the fingerprints of the results.

    Args:
        environment: This machine.
        runs: Number of runs of each case.
        timeout: Seconds allowed for one GPU.
        references: Recorded fingerprints; None for the fingerprints in the package.
        child: Arguments of Python for the selftest's child process; see `run_selftest`.
    """

    def __init__(
        self,
        environment: Environment,
        *,
        runs: int,
        timeout: float,
        references: tuple[Reference, ...] | None = None,
        child: Sequence[str] = CHILD,
    ) -> None:
        self._environment = environment
        self._runs = runs
        self._timeout = timeout
        self._child = child
        self._references = references
        # Shows progress. This default shows none.
        self.working: Working = lambda _: nullcontext(lambda _: None)
        self._launched: set[str] = set()
        self.together: SideBySide | None = None
        self.proven: list[tuple[Gpu, Setting, tuple[Fingerprint, ...]]] = []

    @cached_property
    def _code(self) -> tuple[Mapping[str, str], KernelsError | None]:
        """The hashes of the kernels' code, and why a library cannot be read."""
        try:
            return read_kernels(self._environment.installed.library), None
        except KernelsError as error:
            return {}, error

    @property
    def kernels(self) -> Mapping[str, str]:
        """Hashes of the installed kernels' code by symbol; empty if a library cannot be read."""
        return self._code[0]

    def require_kernels(self) -> None:
        """Check that the kernels' code can be read, without which nothing can be recorded.

        Raises:
            KernelsError: A library cannot be read.
        """
        if problem := self._code[1]:
            raise problem

    @cached_property
    def references(self) -> tuple[Reference, ...]:
        """The recorded fingerprints, read once for all GPUs."""
        return read_references() if self._references is None else self._references

    @contextmanager
    def side_by_side(self, gpus: Iterable[Gpu]) -> Iterator[None]:
        """Run the selftests of these GPUs in parallel; the first call of `run` starts them all."""
        commands = {
            str(gpu.index): make_command(str(gpu.index), self._runs, self._child) for gpu in gpus
        }
        with closing(SideBySide(commands, timeout=self._timeout)) as together:
            self.together = together
            try:
                yield
            finally:
                self.together = None

    def run(self, gpu: Gpu) -> CheckResult:
        """Run the selftest on a GPU; check its variants and bits against prediction and records."""
        together = self.together
        names = together.names if together else (str(gpu.index),)
        what = f"selftest of gpu{'s' if len(names) > 1 else ''} {', '.join(names)}"
        with self.working(what) as say:
            if together:
                together.show = lambda progress: say(f"{what}: {progress}")
            report = run_selftest(
                str(gpu.index),
                runs=self._runs,
                timeout=self._timeout,
                child=self._child,
                together=together,
            )
        predicted = {
            name_kernel(kernel.key): kernel.variant.symbol
            for kernel in judge_gpu(self._environment, gpu).kernels
            if kernel.variant and not is_plain(kernel.key)
        }
        result = check_selftest(report, find_surprises(predicted, report))
        result = compare_selftest(self._environment.loading, report, result)
        return add_agreement(result, self.compare(gpu, report))

    def compare(self, gpu: Gpu, report: SelftestReport) -> Agreement:
        """Keep a GPU's results, and compare them with the recorded results."""
        cuda = self._environment.cuda
        driver = (cuda.driver.release or str(cuda.driver.cuda)) if cuda.driver else ""
        setting = Setting(
            str(gpu.device), gpu.sm_count or 0, find_situation(self._environment, gpu).smem_bytes
        )
        own = make_fingerprints(report, self.kernels, driver)
        self.proven.append((gpu, setting, own))
        self._launched.update(*(one.plan.kernels or self.kernels for one in report.digests))
        agreement = compare_with(self.references, setting, own)
        problem = self._code[1]
        return replace(agreement, unread=problem.message if problem else "")

    def record(self, date: str) -> tuple[Reference, ...]:
        """Return the results so far as references: one for each GPU model and setting."""
        build = self._environment.installed.build
        toolkit = (build.toolkit if build else None) or DEFAULT_TOOLKIT
        found: dict[tuple[str, Setting], Reference] = {}
        for gpu, setting, own in self.proven:
            hashes = self.kernels
            kernels = {name: hashes[name] for name in sorted(self._launched & set(hashes))}
            found.setdefault(
                (gpu.name, setting), Reference(gpu.name, date, setting, kernels, own, toolkit)
            )
        return tuple(found.values())

    def compare_gpus(self) -> CheckResult | None:
        """Compare the bits of GPUs with the same setting; None if no two can be compared."""
        pairs = 0
        differing: list[tuple[Gpu, Gpu, Mismatch]] = []
        for place, (gpu, setting, own) in enumerate(self.proven):
            for other, his_setting, theirs in self.proven[:place]:
                if setting != his_setting:
                    continue
                compared, mismatches = compare_prints(theirs, own)
                pairs += bool(compared)
                differing += [(gpu, other, mismatch) for mismatch in mismatches]
        if not pairs:
            return None
        if not differing:
            count = len(self.proven)
            return CheckResult("ok", f"all {count} GPUs computed the same bits")
        gpu, other, mismatch = differing[0]
        summary = (
            f"gpu {gpu.index} and gpu {other.index} are equal and computed different bits: "
            f"{mismatch}"
        )
        details = tuple(f"gpu {a.index} and gpu {b.index}: {what}" for a, b, what in differing[1:9])
        fix = f"one of them is wrong: `{PROGRAM} fleet` on more GPUs finds out which"
        return CheckResult("fail", summary, details, fix, GPUS_DIFFER)


def run_on_cpu(
    runs: int, *, timeout: float, working: Working, child: Sequence[str] = CHILD
) -> SelftestReport:
    """Run the selftest of the reference path on the CPU, and show progress.

    Args:
        runs: Number of runs of each case.
        timeout: Seconds allowed.
        working: Shows progress, like `Proof.working`.
        child: Arguments of Python for the selftest's child process; see `run_selftest`.
    """
    what = "selftest of the cpu"
    alone = SideBySide({"cpu": make_command("cpu", runs, child)}, timeout=timeout)
    with closing(alone), working(what) as say:
        alone.show = lambda progress: say(f"{what}: {progress}")
        return run_selftest("cpu", runs=runs, timeout=timeout, child=child, together=alone)


def read_kernels(library: str) -> Mapping[str, str]:
    """Return the hash of each kernel's code by symbol.

    Args:
        library: Path of the package's first library, whose folder contains the others; "" for none.

    Raises:
        KernelsError: A library cannot be read.
    """
    found: dict[str, str] = {}
    for name in PRODUCT.libraries if library else ():
        path = Path(library) if name == PRODUCT.library else Path(library).with_name(name)
        found |= read_code_hashes(path)
    return found


def add_agreement(result: CheckResult, agreement: Agreement) -> CheckResult:
    """Add the comparison with recorded bits to a selftest's result, which fails if they differ."""
    data: dict[str, Any] = {**result.data, "fingerprints": agreement.to_json()}
    if agreement or not result:
        return replace(result, details=(*result.details, agreement.sentence), data=data)
    shown = tuple(str(one) for one in agreement.mismatches[1:9])
    return replace(
        result,
        status="fail",
        summary=agreement.sentence,
        details=(result.summary, *result.all_details, *shown),
        background=(),
        fix="this GPU computes other bits than another GPU of its model: run "
        f"`{PROGRAM} selftest --runs 1000` on it and its neighbours, and check it",
        entry=FINGERPRINT_DIFFERS,
        data=data,
    )


def compare_selftest(loading: Loading, report: SelftestReport, result: CheckResult) -> CheckResult:
    """If loading fails although it was predicted to work, add that to the selftest's result."""
    failed = {finding.entry for finding in report.findings} & {SELFTEST_CRASHED, SELFTEST_ERROR}
    if report.imported or not failed or loading.status != "ok":
        return result
    detail = "predicted from symbol tables: everything loads"
    summary = f"loading was predicted to work, but fails: {result.summary}"
    return replace(
        result, summary=summary, details=(*result.details, detail), entry=LOAD_PREDICTION_DIFFERS
    )
