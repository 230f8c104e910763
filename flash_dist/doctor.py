"""Examine a machine, or one that is not here: every GPU against the code really embedded."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from .checks import (
    check_build,
    check_driver,
    check_install,
    check_system,
    check_torch,
    check_variables,
)
from .gpu_checks import check_all_gpus, check_gpu
from .loading_checks import check_loading
from .result import CheckResult, exit_code, worst_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .environment import Environment
    from .nvidia import Gpu

    Check = Callable[[Environment], CheckResult]
    GpuCheck = Callable[[Gpu], CheckResult]

JSON_VERSION = 1

CHECKS: tuple[tuple[str, Check], ...] = (
    ("system", check_system),
    ("torch", check_torch),
    ("install", check_install),
    ("build", check_build),
    ("extension", check_loading),
    ("variables", check_variables),
    ("driver", check_driver),
)
WHAT_IF_CHECKS: tuple[tuple[str, Check], ...] = (("build", check_build), ("driver", check_driver))


@dataclass(frozen=True)
class Examination:
    """All results of one run of doctor."""

    environment: Environment
    results: tuple[CheckResult, ...]

    def __bool__(self) -> bool:
        return all(self.results)

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 0, 1 or 3; a what-if is never "nothing checked"."""
        checked = self.environment.what_if or bool(self.environment.cuda.gpus)
        return exit_code(self.results, checked_gpu=checked, strict=strict)

    def to_json(self, *, strict: bool = False) -> dict[str, Any]:
        """Return the whole examination as plain data."""
        return {
            "version": JSON_VERSION,
            "command": "doctor",
            "status": worst_status(self.results),
            "exit_code": self.exit_code(strict=strict),
            "what_if": self.environment.what_if,
            "environment": self.environment.to_json(),
            "checks": [result.to_json() for result in self.results],
        }


def examine(environment: Environment, *, selftest: GpuCheck | None = None) -> Iterator[CheckResult]:
    """Yield the result of each check as soon as it is known.

    Args:
        environment: The machine, real or imagined.
        selftest: Runs the kernels on one GPU. None leaves that out.
    """
    for name, check in WHAT_IF_CHECKS if environment.what_if else CHECKS:
        yield guard(name, partial(check, environment))
    if not environment.cuda.gpus:
        yield check_any_gpu(environment)
    judged = []
    for gpu in environment.cuda.gpus:
        result = guard(f"gpu {gpu.index}", partial(check_gpu, environment, gpu), gpu=gpu.index)
        judged.append(result)
        yield result
    together = check_all_gpus(environment, judged) if environment.installed.build else None
    if together is not None:
        yield together
    if environment.what_if or selftest is None:
        return
    for gpu, result in zip(environment.cuda.gpus, judged, strict=True):
        yield _run_selftest(environment, gpu, selftest, fit=_is_fit(result))


def will_run(environment: Environment) -> bool:
    """Whether the selftest would run on a GPU here, and with it load everything for real."""
    return environment.loading.status == "ok" and any(
        _is_fit(guard("", partial(check_gpu, environment, gpu))) for gpu in environment.cuda.gpus
    )


def _is_fit(result: CheckResult) -> bool:
    return result.status in {"ok", "warn"}


def check_any_gpu(environment: Environment) -> CheckResult:
    """There is no GPU: say what that leaves open."""
    cuda = environment.cuda
    reason = cuda.reason if cuda.status == "ok" else ""  # else the driver's check says it
    return CheckResult(
        "gpu",
        "skip",
        "no GPU here, so nothing could be proven" + (f" ({reason})" if reason else ""),
        fix="`python -m flash_dist doctor --gpu 8.6,9.0 --driver 580` judges GPUs not here",
        id="no-gpu",
    )


def _run_selftest(
    environment: Environment, gpu: Gpu, selftest: GpuCheck, *, fit: bool
) -> CheckResult:
    name = f"selftest {gpu.index}"
    loads = environment.loading.status == "ok"
    if fit and loads:
        return guard(name, partial(selftest, gpu), gpu=gpu.index)
    reason = "no code for this GPU" if loads else "the extension does not load"
    return CheckResult(name, "skip", f"not run: {reason}", id="selftest-not-run", gpu=gpu.index)


def guard(name: str, check: Callable[[], CheckResult], *, gpu: int | None = None) -> CheckResult:
    """Run a check; if it crashes, that is its result."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other checks must still run
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        where = lines[-2].strip().splitlines()[0] if len(lines) > 1 else ""
        return CheckResult(
            name,
            "fail",
            f"the check itself crashed: {type(error).__name__}: {error}",
            (where,) if where else (),
            "this is a bug in flash_dist: report it with the output of `doctor --json`",
            "check-crashed",
            gpu,
        )
