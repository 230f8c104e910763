"""`python -m flash_dist doctor`: judge every GPU against the code really embedded, and prove it."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from flash_dist.checks.choice import EVERYTHING, CheckChoice
from flash_dist.checks.libraries import examine_libraries
from flash_dist.devices import Device, Driver
from flash_dist.doctor import Examination, check_names, examine, limit_gpus, will_run
from flash_dist.environment import (
    VARIABLES,
    gather_environment,
    gather_gpus,
    imagine_environment,
    prove_loading,
)
from flash_dist.errors import UsageError, wrong_usage
from flash_dist.explain import explain
from flash_dist.findings import suggest
from flash_dist.installed import Installed
from flash_dist.libraries import open_libraries, package_libraries
from flash_dist.proof import Proof
from flash_dist.remote import at_hand
from flash_dist.result import EXIT_FINE, EXIT_NOTHING_CHECKED
from flash_dist.selftest import DEFAULT_RUNS, DEFAULT_TIMEOUT

from .fleet import LAUNCHER, run_fleet
from .progress import downloading, working
from .report_page import add_report_option, write_report
from .results import is_shown, make_console, print_result
from .selftest import parse_runs
from .text import add_subcommand, complain, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from flash_dist.environment import Environment
    from flash_dist.libcuda import Gpu
    from flash_dist.result import CheckResult

    from .text import Subparsers

EPILOG = """\
examples:
  python -m flash_dist doctor
  python -m flash_dist doctor --gpu 7.5,8.6 --driver 535
  python -m flash_dist doctor --only driver,gpu --devices 0,2
  python -m flash_dist doctor --package xformers --gpu 7.5,8.6
  python -m flash_dist doctor --report report.html
  python -m flash_dist doctor --explain "device kernel image is invalid"
  torchrun --nproc-per-node=gpu -m flash_dist doctor --fleet --rounds 10

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check
"""

_SHOWN_MESSAGE = 200
_FOLDED = 1  # line of detail is as short as the word that it is the same

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
    parser.add_argument("--json", action="store_true", help="print JSON (docs/schema/doctor.json)")
    parser.add_argument("--strict", action="store_true", help="warnings count as failures")
    parser.add_argument(
        "--no-selftest",
        action="store_true",
        help="do not run the kernels, and predict whether they load",
    )
    parser.add_argument(
        "--only",
        type=parse_names,
        metavar="NAMES",
        default=frozenset(),
        help="run these checks alone: " + ", ".join(check_names()),
    )
    parser.add_argument(
        "--skip",
        type=parse_names,
        metavar="NAMES",
        default=frozenset(),
        help="run all checks but these",
    )
    parser.add_argument(
        "--devices",
        type=parse_indices,
        metavar="LIST",
        help="judge and test these GPUs alone, such as 0,2 in CUDA's order",
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
        metavar="PLACE",
        action="append",
        default=[],
        help="judge a wheel, library or folder before it is installed, ours or anybody's: a path, "
        "the address of a file, or that of an index page, of which the wheel that fits best is",
    )
    add_report_option(parser)
    parser.add_argument(
        "--explain",
        metavar="TEXT",
        help="say what an error message about GPU code, or the id of a finding, means",
    )
    parser.add_argument(
        "--runs",
        type=parse_runs,
        default=DEFAULT_RUNS,
        metavar="N",
        help="runs per case of the selftest (default: %(default)s)",
    )
    parser.add_argument(
        "--fleet",
        action="store_true",
        help="under torchrun: prove the GPU of every rank, and that all compute the same bits",
    )
    parser.add_argument(
        "--rounds",
        type=parse_rounds,
        default=1,
        metavar="N",
        help="with --fleet: how often, for a burn-in (default: %(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=("gloo", "nccl"),
        default="gloo",
        help="with --fleet: what carries the fingerprints (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def parse_rounds(text: str) -> int:
    """Read a number of rounds."""
    if not text.isdecimal() or not int(text):
        message = f"rounds must be a number of at least 1, got `{text}`"
        raise UsageError(message, hint="`--rounds 10` repeats the selftest ten times")
    return int(text)


def parse_names(text: str) -> frozenset[str]:
    """Read `driver,gpu`."""
    return frozenset(name.strip() for name in text.split(","))


def parse_indices(text: str) -> tuple[int, ...]:
    """Read `0,2`."""
    names = [name.strip() for name in text.split(",")]
    if not all(name.isascii() and name.isdecimal() for name in names):
        message = f"devices are numbers such as `0,2`, got `{text}`"
        raise UsageError(message, hint="`python -m flash_dist doctor` lists the GPUs")
    return tuple(sorted(set(map(int, names))))


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
    if args.fleet:
        return run_fleet(
            runs=args.runs, rounds=args.rounds, backend=args.backend, as_json=args.json
        )
    if args.rounds > 1:
        message = f"--rounds is for a fleet, got --rounds {args.rounds} without --fleet"
        raise UsageError(message, hint=f"`{LAUNCHER} --rounds {args.rounds}`")
    if args.explain is not None:
        return run_explain(args.explain, as_json=args.json)
    if args.package or args.wheel:
        return run_libraries(args)
    choice = choose_checks(args)
    environment = imagine(args) if args.gpu else gather_environment(choice)
    limit_gpus(environment, choice.devices)  # a GPU that is not there is refused first
    if {"selftest", "extension"} <= set(filter(choice.__contains__, check_names())):
        environment = environment if will_run(environment) else prove_loading(environment)
    selftest = ShownProof(environment, runs=args.runs, timeout=DEFAULT_TIMEOUT)
    results = examine(environment, selftest=selftest, choice=choice)
    return _report(args, environment, results, choice)


def choose_checks(args: argparse.Namespace) -> CheckChoice:
    """Return which checks are wanted."""
    skip = args.skip | ({"selftest"} if args.no_selftest and not args.gpu else set())
    choice = CheckChoice(args.only, skip, args.devices)
    choice.require_known(check_names(what_if=bool(args.gpu)))
    return choice


def run_explain(message: str, *, as_json: bool) -> int:
    """Explain a message or an id; one that is not known is nothing that could be checked."""
    explanation = explain(message)
    if explanation is None:
        shown = message if len(message) <= _SHOWN_MESSAGE else f"{message[:_SHOWN_MESSAGE]}..."
        complain(f"this message is not known: {printable(shown)}")
        meant = suggest(message)
        if meant is not None:
            complain(f"\nhint: the id `{meant}` is known")
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
    if args.only or args.skip:
        message = "--only and --skip choose checks of this build, not of --package and --wheel"
        raise UsageError(message, hint="leave them out")
    environment = imagine(args, Installed()) if args.gpu else gather_gpus()
    environment = limit_gpus(environment, args.devices)
    with ExitStack() as stack:
        progress = stack.enter_context(downloading())
        artefacts = [
            stack.enter_context(at_hand(place, environment, progress=progress))
            for place in args.wheel
        ]
        opened = [
            *map(package_libraries, args.package),
            *(open_libraries(artefact.path) for artefact in artefacts),
        ]
        listings = (artefact.listing for artefact in artefacts if artefact.listing)
        results = examine_libraries(environment, chain(*opened))
        return _report(args, environment, chain(listings, results))


def _report(
    args: argparse.Namespace,
    environment: Environment,
    results: Iterator[CheckResult],
    choice: CheckChoice = EVERYTHING,
) -> int:
    examination = Examination(environment, tuple(_show(results, args)), choice)
    code = examination.exit_code(strict=args.strict)
    document = examination.to_json(strict=args.strict) if args.json or args.report else {}
    if args.report:
        write_report(args.report, document)
    if args.json:
        print(json.dumps(document, indent=2))
    else:
        make_console().print(f"{'' if args.quiet else chr(10)}{describe_end(examination, code)}")
    return code


def _show(results: Iterator[CheckResult], args: argparse.Namespace) -> Iterator[CheckResult]:
    console = make_console()
    first: CheckResult | None = None
    for result in results:
        shown = result
        if first is not None and not args.verbose:
            shown = fold(result, first)
        if not args.json and is_shown(result, quiet=args.quiet):
            print_result(console, shown)
        if result.gpu is not None and shown is result:
            first = result
        yield result


def fold(result: CheckResult, first: CheckResult) -> CheckResult:
    """Leave out the details of a GPU that fares as one before it does; -v prints them."""
    kinds = {one.name.split()[0] for one in (result, first)}
    same = (result.status, result.details) == (first.status, first.details)
    if len(kinds) == 1 and same and len(result.details) > _FOLDED:
        return replace(result, details=(f"in detail as {first.name}",))
    return result


def describe_end(examination: Examination, code: int) -> str:
    """Sum up in one line."""
    counts = {
        status: sum(result.status == status for result in examination.results)
        for status in ("ok", "warn", "fail", "skip")
    }
    counted = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    reason = "warnings count as failures" if code == 1 and not counts["fail"] else _CONCLUSION[code]
    return f"{counted}: {reason} (exit status {code})"


class ShownProof(Proof):
    """Shows on a terminal that a GPU is at work."""

    def run(self, gpu: Gpu) -> CheckResult:
        """Run the selftest of a GPU."""
        with working(f"selftest of gpu {gpu.index}"):
            return super().run(gpu)
