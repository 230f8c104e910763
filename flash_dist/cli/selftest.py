"""`python -m flash_dist selftest`: run the kernels and prove bits and values."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from flash_dist.advice import torch_fix
from flash_dist.environment import read_torch
from flash_dist.errors import FlashDistError, UsageError
from flash_dist.nvidia import read_cuda
from flash_dist.result import CheckResult, exit_code, worst_status
from flash_dist.selftest import (
    DEFAULT_RUNS,
    DEFAULT_TIMEOUT,
    JSON_VERSION,
    SelftestReport,
    check_selftest,
    run_selftest,
)

from .results import make_console, print_result, working
from .text import add_subcommand

if TYPE_CHECKING:
    import argparse

    from flash_dist.environment import Torch
    from flash_dist.nvidia import Cuda

    from .text import Subparsers

EPILOG = """\
examples:
  python -m flash_dist selftest
  python -m flash_dist selftest --runs 1000 --device 1

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to test
"""


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "selftest",
        summary="run the kernels: bit-equal runs, right values, no crash",
        description="Run forward and backward on every GPU: out, lse, dq, dk and dv must be "
        "bit-equal in all runs, over poisoned memory and on two streams at once, and agree with a "
        "float64 reference.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--runs",
        type=parse_runs,
        default=DEFAULT_RUNS,
        metavar="N",
        help="runs per case (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=parse_device,
        metavar="N",
        help="one GPU, in CUDA's order (default: all); `cpu` tests the reference path",
    )
    parser.add_argument(
        "--timeout",
        type=parse_timeout,
        default=DEFAULT_TIMEOUT,
        metavar="S",
        help="seconds that one GPU may take (default: %(default)g)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print JSON (docs/schema/selftest.json)"
    )
    parser.set_defaults(run=run)


def parse_runs(text: str) -> int:
    """Read a number of runs; two are needed to compare."""
    if not text.isdecimal() or int(text) < 2:  # noqa: PLR2004 - said in the message
        message = f"runs must be a number of at least 2, got `{text}`"
        raise UsageError(message, hint=f"`--runs {DEFAULT_RUNS}` is the default")
    return int(text)


def parse_device(text: str) -> str:
    """Read a device: a number or `cpu`."""
    if text != "cpu" and not text.isdecimal():
        message = f"a device is a number or `cpu`, got `{text}`"
        raise UsageError(message, hint="`python -m flash_dist doctor` lists the GPUs")
    return text


def parse_timeout(text: str) -> float:
    """Read a number of seconds."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        message = f"a timeout must be a number of seconds, positive and finite, got `{text}`"
        raise UsageError(message, hint=f"`--timeout {DEFAULT_TIMEOUT:g}` is the default")
    return seconds


def run(args: argparse.Namespace) -> int:
    """Test each device, print each result as it comes, and return the exit code."""
    cuda, torch = read_cuda(), read_torch()
    console = make_console()
    results, reports = [], []
    devices = choose_devices(args.device, cuda)
    for device in devices if torch.status == "ok" else ():
        with working(f"selftest of device {device}"):
            report = run_selftest(device, runs=args.runs, timeout=args.timeout)
        reports.append(report)
        results.append(_present(report))
        if not args.json:
            print_result(console, results[-1])
            _print_variants(report)
    if not reports:
        results.append(_nothing_to_run(torch) if devices else _nothing_to_test(cuda))
        if not args.json:
            print_result(console, results[-1])
    code = exit_code(tuple(results), checked_gpu=bool(reports))
    if args.json:
        print(json.dumps(_to_json(reports, results, code), indent=2))
    return code


def choose_devices(asked: str | None, cuda: Cuda) -> list[str]:
    """Return the devices to test."""
    known = [str(gpu.index) for gpu in cuda.gpus]
    if asked is None:
        return known
    if asked != "cpu" and asked not in known:
        allowed = f"{', '.join(known)} or cpu" if known else "cpu where there is no GPU"
        message = f"device must be {allowed}, got {asked}"
        raise FlashDistError(message, hint="`python -m flash_dist doctor` lists the GPUs")
    return [asked]


def _present(report: SelftestReport) -> CheckResult:
    return check_selftest(report, None if report.device == "cpu" else int(report.device))


def _print_variants(report: SelftestReport) -> None:
    for variant in report.loaded:
        print(f"{'':20}{variant}")


def _nothing_to_run(torch: Torch) -> CheckResult:
    return CheckResult(
        "selftest",
        "fail",
        f"not run: {torch.reason}",
        fix=torch_fix(),
        id=f"torch-{torch.status}",
    )


def _nothing_to_test(cuda: Cuda) -> CheckResult:
    reason = f" ({cuda.reason})" if cuda.reason else ""
    broken = cuda.status == "broken"
    return CheckResult(
        "selftest",
        "fail" if broken else "skip",
        f"no GPU here, so nothing could be proven{reason}",
        fix="`--device cpu` tests the reference path",
        id="driver-broken" if broken else "no-gpu",
    )


def _to_json(
    reports: list[SelftestReport], results: list[CheckResult], code: int
) -> dict[str, object]:
    return {
        "version": JSON_VERSION,
        "command": "selftest",
        "status": worst_status(tuple(results)),
        "exit_code": code,
        "ids": [result.id for result in results if result.id],
        "summaries": [result.summary for result in results],
        "devices": [report.to_json() for report in reports],
    }
