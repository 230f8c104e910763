"""`python -m flash_dist doctor`: judge every GPU against the code really embedded, and prove it."""

from __future__ import annotations

import json
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from flash_dist.devices import Device, Driver
from flash_dist.doctor import Examination, examine, will_run
from flash_dist.environment import (
    VARIABLES,
    gather_environment,
    gather_gpus,
    imagine_environment,
    prove_loading,
)
from flash_dist.errors import UsageError, wrong_usage
from flash_dist.explain import explain
from flash_dist.gpu_checks import judge_gpu
from flash_dist.installed import Installed
from flash_dist.libraries import open_libraries, package_libraries
from flash_dist.library_checks import examine_libraries
from flash_dist.loading_checks import compare_selftest
from flash_dist.result import EXIT_FINE, EXIT_NOTHING_CHECKED
from flash_dist.selftest import DEFAULT_RUNS, check_selftest, find_surprises, run_selftest
from flash_dist.verdict import name_size

from .results import make_console, print_result, working
from .text import add_subcommand, complain, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from flash_dist.environment import Environment
    from flash_dist.nvidia import Gpu
    from flash_dist.result import CheckResult

    from .text import Subparsers

EPILOG = """\
examples:
  python -m flash_dist doctor
  python -m flash_dist doctor --gpu 7.5,8.6 --driver 535
  python -m flash_dist doctor --package xformers --gpu 7.5,8.6
  python -m flash_dist doctor --explain "device kernel image is invalid"

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check
"""

_SHOWN_MESSAGE = 200

_CONCLUSION = {
    0: "no failure",
    1: "at least one failure",
    3: "nothing could be checked: there is no GPU",
}


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "doctor",
        summary="judge every GPU of this machine against the code in the installed build",
        description="Judge every GPU against the code really embedded in the installed build, "
        "then run the kernels on it.",
        epilog=EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
    parser.add_argument(
        "--no-selftest",
        action="store_true",
        help="do not run the kernels, and predict whether they load",
    )
    parser.add_argument(
        "--gpu",
        type=parse_devices,
        metavar="LIST",
        help="what if: judge GPUs of these compute capabilities, such as 7.5,8.6",
    )
    parser.add_argument(
        "--driver", type=parse_driver, metavar="V", help="what if: with this driver, such as 535"
    )
    parser.add_argument(
        "--env",
        type=parse_variable,
        metavar="K=V",
        action="append",
        default=[],
        help="what if: with this environment variable, such as CUDA_FORCE_PTX_JIT=1",
    )
    parser.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help="judge all libraries of an installed distribution instead of this one's kernels",
    )
    parser.add_argument(
        "--wheel",
        metavar="PATH",
        type=Path,
        action="append",
        default=[],
        help="judge a wheel, library or folder before it is installed, ours or anybody's",
    )
    parser.add_argument(
        "--explain", metavar="MESSAGE", help="say what an error message about GPU code means"
    )
    parser.set_defaults(run=run)


def parse_devices(text: str) -> tuple[Device, ...]:
    """Read `7.5,8.6`."""
    with wrong_usage():
        return tuple(Device.parse(one) for one in text.split(","))


def parse_driver(text: str) -> Driver:
    """Read `535` or `580.65.06`."""
    with wrong_usage():
        return Driver.parse(text)


def parse_variable(text: str) -> tuple[str, str]:
    """Read `CUDA_FORCE_PTX_JIT=1`."""
    name, equals, value = text.partition("=")
    if not equals or name not in VARIABLES:
        message = f"--env must be NAME=VALUE with a NAME that is judged, got `{text}`"
        raise UsageError(message, hint=f"the names are {', '.join(VARIABLES)}")
    return name, value


def imagine(args: argparse.Namespace, installed: Installed | None = None) -> Environment:
    """Make up the machine that the command line names."""
    return imagine_environment(args.gpu, args.driver, dict(args.env), installed=installed)


def run(args: argparse.Namespace) -> int:
    """Examine, print each result as it comes, and return the exit code."""
    if args.driver and not args.gpu:
        message = "--driver is for a what-if, which needs the GPUs too"
        raise UsageError(message, hint=f"`doctor --gpu 8.6 --driver {args.driver.release}`")
    if args.env and not args.gpu:
        name, value = args.env[0]
        message = "--env is for a what-if, which needs the GPUs too"
        raise UsageError(message, hint=f"`doctor --gpu 8.6 --env {name}={value}`")
    if args.explain is not None:
        return run_explain(args.explain, as_json=args.json)
    if args.package or args.wheel:
        return run_libraries(args)
    environment = imagine(args) if args.gpu else gather_environment()
    if not args.no_selftest and not will_run(environment):
        environment = prove_loading(environment)
    selftest = None if args.no_selftest else partial(check_gpu_by_running, environment)
    return _report(args, environment, examine(environment, selftest=selftest))


def run_explain(message: str, *, as_json: bool) -> int:
    """Explain a message; one that is not known is nothing that could be checked."""
    explanation = explain(message)
    if explanation is None:
        shown = message if len(message) <= _SHOWN_MESSAGE else f"{message[:_SHOWN_MESSAGE]}..."
        complain(f"this message is not known: {printable(shown)}")
        return EXIT_NOTHING_CHECKED
    if as_json:
        print(json.dumps(explanation.to_json(), indent=2))
        return EXIT_FINE
    console = make_console()
    console.print(printable(explanation.summary), soft_wrap=True)
    for detail in explanation.details:
        console.print(f"  {printable(detail)}", soft_wrap=True)
    for step in explanation.steps:
        console.print(f"fix: {printable(step)}", soft_wrap=True)
    return EXIT_FINE


def run_libraries(args: argparse.Namespace) -> int:
    """Judge the libraries of others, print each result as it comes, and return the exit code."""
    environment = imagine(args, Installed()) if args.gpu else gather_gpus()
    opened = [*map(package_libraries, args.package), *map(open_libraries, args.wheel)]
    return _report(args, environment, examine_libraries(environment, chain(*opened)))


def _report(
    args: argparse.Namespace, environment: Environment, results: Iterator[CheckResult]
) -> int:
    examination = Examination(environment, tuple(_show(results, quiet=args.json)))
    code = examination.exit_code(strict=args.strict)
    if args.json:
        print(json.dumps(examination.to_json(strict=args.strict), indent=2))
    else:
        make_console().print(f"\n{describe_end(examination, code)}")
    return code


def _show(results: Iterator[CheckResult], *, quiet: bool) -> Iterator[CheckResult]:
    console = make_console()
    for result in results:
        if not quiet:
            print_result(console, result)
        yield result


def describe_end(examination: Examination, code: int) -> str:
    """Sum up in one line."""
    counts = {
        status: sum(result.status == status for result in examination.results)
        for status in ("ok", "warn", "fail", "skip")
    }
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    reason = "warnings count as failures" if code == 1 and not counts["fail"] else _CONCLUSION[code]
    return f"{counted}: {reason} (exit status {code})"


def check_gpu_by_running(environment: Environment, gpu: Gpu) -> CheckResult:
    """Run the selftest on a GPU and compare what ran with what was predicted."""
    with working(f"selftest of gpu {gpu.index}"):
        report = run_selftest(str(gpu.index), runs=DEFAULT_RUNS)
    predicted = {
        "{} {} {}".format(*kernel.key[:2], name_size(*kernel.key[2:])): kernel.variant.symbol
        for kernel in judge_gpu(environment, gpu).kernels
        if kernel.variant
    }
    result = check_selftest(report, gpu.index, find_surprises(predicted, report))
    return compare_selftest(environment.loading, report, result)
