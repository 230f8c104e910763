"""Runs the checks on a machine, real or imagined, and judges its GPUs by the embedded code."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..checks.driver import check_driver, check_jit, check_neutral, check_variables
from ..checks.environment import EVERYTHING, CheckChoice
from ..checks.gpus import check_all_gpus, check_any_gpu, check_gpu
from ..checks.host import check_compat, check_devices
from ..checks.install import check_build, check_install, check_system, check_torch, require_torch
from ..checks.loading import check_loading
from ..checks.torch_claim import check_torch_claim
from ..checks.visible import check_mig, check_visible
from ..errors import UsageError
from ..findings.libraries import NO_GPU_CODE
from ..findings.proofs import SELFTEST_NOT_RUN
from ..findings.result import CheckResult, exit_code, guard, worst_status
from ..product import IMPORTED_AS, NO_CASES, PRODUCT, PROGRAM

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from ..checks.environment import Environment
    from ..machine.libcuda import Gpu

    Check = Callable[[Environment], CheckResult | None]  # None: nothing to report
    GpuCheck = Callable[[Gpu], CheckResult]

CHECKS: tuple[tuple[str, Check], ...] = (
    ("system", check_system),
    ("torch", check_torch),
    ("install", check_install),
    ("build", check_build),
    ("extension", check_loading),
    ("variables", check_variables),
    ("driver", check_driver),
)
# Checks that have something to report on few machines; no result means all is well.
RARE_CHECKS: tuple[tuple[str, Check], ...] = (
    ("devices", check_devices),
    ("compat", check_compat),
    ("visible", check_visible),
    ("mig", check_mig),
    ("jit", check_jit),
)
WHAT_IF_CHECKS: tuple[tuple[str, Check], ...] = (
    ("build", check_build),
    ("driver", check_driver),
    ("variables", check_neutral),
)
GPU_CHECKS = ("gpu", "selftest")  # run once for each GPU


def check_names(*, what_if: bool = False) -> tuple[str, ...]:
    """Return the names that `--only` and `--skip` accept."""
    checks = WHAT_IF_CHECKS if what_if else (*CHECKS, *RARE_CHECKS)
    names = [name for name, _ in checks]
    return (*names, *(GPU_CHECKS[:1] if what_if else GPU_CHECKS))


@dataclass(frozen=True)
class Examination:
    """All results of one run of doctor."""

    environment: Environment
    results: tuple[CheckResult, ...]
    choice: CheckChoice = EVERYTHING
    record: Mapping[str, str] | None = None  # `Record.origin`; None without a record

    def __bool__(self) -> bool:
        return all(self.results)

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 for findings, 3 if GPUs should have been judged but none was, else 0."""
        wanted = any(name in self.choice for name in GPU_CHECKS)
        checked = not wanted or any(map(self._is_of_gpu, self.results))
        return exit_code(self.results, checked_gpu=checked, strict=strict)

    def _is_of_gpu(self, result: CheckResult) -> bool:
        """Tell if a result judges a GPU; libraries without GPU code get one result for all GPUs."""
        if result.entry is NO_GPU_CODE:
            return bool(self.environment.cuda.gpus)
        return result.gpu is not None and result.status != "skip"

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the whole examination as plain data."""
        return {
            "version": 1,
            "command": "doctor",
            "status": worst_status(self.results),
            "exit_code": self.exit_code(strict=strict),
            "what_if": self.environment.what_if,
            "record": dict(self.record) if self.record else None,
            "choice": self.choice.to_json(),
            "environment": self.environment.to_json(),
            "checks": [result.to_json() for result in self.results],
        }


class Selftest(Protocol):
    """Runs the kernels of the selftest on GPUs."""

    def side_by_side(self, gpus: Iterable[Gpu]) -> AbstractContextManager[None]:
        """Run the selftests of these GPUs in parallel while the context is open."""

    def run(self, gpu: Gpu) -> CheckResult:
        """Run the kernels on one GPU."""

    def compare_gpus(self) -> CheckResult | None:
        """Compare the bits of GPUs with the same setting; None if no two can be compared."""


def examine(
    environment: Environment, *, selftest: Selftest | None = None, choice: CheckChoice = EVERYTHING
) -> Iterator[CheckResult]:
    """Yield the result of each check as soon as it is known.

    Args:
        environment: The machine, real or imagined.
        selftest: Runs the kernels on GPUs. None: skip the selftest.
        choice: Which checks to run.
    """
    yield from _examine_machine(environment, choice)
    wanted = limit_gpus(environment, choice.devices)
    if not wanted.cuda.gpus and any(name in choice for name in GPU_CHECKS):
        yield from guard("gpu", partial(check_any_gpu, environment))
    judged: list[CheckResult] = []
    for gpu in wanted.cuda.gpus if "gpu" in choice else ():
        judged += guard(f"gpu {gpu.index}", partial(check_gpu, wanted, gpu), gpu=gpu.index)
        yield judged[-1]
    if environment.installed.build:
        yield from guard("gpus", partial(check_all_gpus, wanted, judged))
    for gpu in wanted.cuda.gpus if "torch" in choice else ():
        claim = partial(check_torch_claim, environment, gpu)
        yield from guard(f"torch {gpu.index}", claim, gpu=gpu.index)
    if environment.what_if or selftest is None or "selftest" not in choice:
        return
    if not (IMPORTED_AS or environment.installed.build):  # a standalone toolkit has no kernels
        return
    unfit = {result.gpu for result in judged if not result.is_usable}
    if not PRODUCT.cases:
        unfit.update(gpu.index for gpu in wanted.cuda.gpus)  # so that no child process starts
    with selftest.side_by_side(gpu for gpu in wanted.cuda.gpus if gpu.index not in unfit):
        for gpu in wanted.cuda.gpus:
            fit = gpu.index not in unfit
            prove = partial(_run_selftest, environment, gpu, selftest.run, fit=fit)
            yield from guard(f"selftest {gpu.index}", prove, gpu=gpu.index)
    yield from guard("agreement", selftest.compare_gpus)


def _examine_machine(environment: Environment, choice: CheckChoice) -> Iterator[CheckResult]:
    for name, check in (*(WHAT_IF_CHECKS if environment.what_if else CHECKS), *RARE_CHECKS):
        if name in choice:
            yield from guard(name, partial(check, environment))


def limit_gpus(environment: Environment, indices: tuple[int, ...] | None) -> Environment:
    """Restrict the environment to some GPUs; if there is no GPU, the checks report that.

    Raises:
        UsageError: A requested GPU does not exist, but other GPUs do.
    """
    if indices is None:
        return environment
    cuda = environment.cuda
    known = [gpu.index for gpu in cuda.gpus]
    unknown = [index for index in indices if index not in known]
    if known and unknown:
        message = f"devices must be among {', '.join(map(str, known))}, got {unknown[0]}"
        raise UsageError(message, hint=f"`{PROGRAM} doctor` lists the GPUs")
    gpus = tuple(gpu for gpu in cuda.gpus if gpu.index in indices)
    return replace(environment, cuda=replace(cuda, gpus=gpus))


def will_run(environment: Environment) -> bool:
    """Tell if the selftest would run on a GPU here, so that loading needs no separate test."""
    loads = bool(PRODUCT.cases) and environment.loading.status == "ok"
    return loads and any(
        result.is_usable
        for gpu in environment.cuda.gpus
        for result in guard("", partial(check_gpu, environment, gpu))
    )


def _run_selftest(
    environment: Environment, gpu: Gpu, selftest: GpuCheck, *, fit: bool
) -> CheckResult:
    if not PRODUCT.cases:
        return CheckResult("skip", f"not run: {NO_CASES}", entry=SELFTEST_NOT_RUN)
    loads = environment.loading.status in {"ok", "skipped"}
    if fit and loads and environment.torch.status != "ok":  # loading was not checked
        return require_torch(environment.torch, environment.installed.torch_min)
    if fit and loads:
        return selftest(gpu)
    reason = "no code for this GPU" if loads else "the extension does not load"
    return CheckResult("skip", f"not run: {reason}", entry=SELFTEST_NOT_RUN)
