"""`doctor`: judges every GPU against the embedded code, and runs the selftest."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

from ..checks.environment import (
    EVERYTHING,
    CheckChoice,
    gather_environment,
    gather_gpus,
    imagine_environment,
    prove_loading,
)
from ..checks.libraries import examine_libraries
from ..doctor.artefact import at_hand
from ..doctor.examine import Examination, check_names, examine, limit_gpus, will_run
from ..doctor.proof import Proof
from ..findings.result import EXIT_NOTHING_CHECKED
from ..gpucode.libraries import open_libraries, package_libraries
from ..machine.installed import Installed
from ..product import PROGRAM
from ..selftest.run import DEFAULT_RUNS, DEFAULT_TIMEOUT
from ..version import read_version
from .doctor_files import PIPE, load_record, save_record, write_report
from .doctor_options import add_options, require_fitting
from .options import add_subcommand
from .terminal.progress import downloading, testing
from .terminal.results import is_shown, make_console, print_result

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator, Sequence

    from ..checks.environment import Environment
    from ..doctor.record import Record
    from ..findings.result import CheckResult, Status
    from ..gpucode.archives import Library, Unread
    from .options import Subparsers

EPILOG = f"""\
examples:
  {PROGRAM} doctor
  {PROGRAM} doctor --gpu 7.5,8.6 --driver 535
  {PROGRAM} doctor --only driver,gpu --devices 0,2
  {PROGRAM} doctor --package xformers --gpu 7.5,8.6
  {PROGRAM} doctor --report report.html
  {PROGRAM} doctor --save record.json
  {PROGRAM} doctor --load record.json

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check,
or nothing to judge on one
"""

_FOLDED = 1  # details of at most this many lines are repeated, not folded

_OF_MACHINE = {"driver", "variables", "gpu"}  # checks with the same result for all wheels

_CONCLUSION = {0: "no failure", 1: "at least one failure", 3: "nothing could be checked"}


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "doctor",
        summary="judge every GPU of this machine against the code in the installed build",
        description="Judge every GPU against the code really embedded in the installed build, "
        "then run the kernels on it.",
        epilog=EPILOG,
    )
    add_options(parser)
    parser.set_defaults(run=run)


def imagine(
    args: argparse.Namespace, record: Record | None, installed: Installed | None = None
) -> Environment:
    """Return a machine with the GPUs, driver and variables of the command line.

    Everything else is taken from the record or, without a record, from this machine.
    """
    around = record.environment if record else None
    return imagine_environment(
        args.gpu, args.driver, dict(args.env), installed=installed, around=around
    )


def run(args: argparse.Namespace) -> int:
    """Examine a machine or libraries, print results as they arrive, and return the exit code."""
    require_fitting(args)
    record = load_record(args.load) if args.load else None
    if record and not args.json and not args.quiet:
        make_console().print(f"{record}, judged by {read_version()}", soft_wrap=True)
    if args.package or args.wheel:
        return run_libraries(args, record)
    if record and not args.gpu:
        environment = record.environment
        choice = record.narrow(choose_checks(args, what_if=environment.what_if))
        limit_gpus(environment, choice.devices)
        results = examine(environment, selftest=record, choice=choice)
        return _report(args, environment, results, choice=choice, record=record)
    choice = choose_checks(args)
    environment = imagine(args, record) if args.gpu else gather_environment(choice)
    limit_gpus(environment, choice.devices)  # fail early if a GPU is absent
    if "selftest" in choice and "extension" in choice and not will_run(environment):
        environment = prove_loading(environment)
    runs = args.runs or DEFAULT_RUNS
    silent = args.json or args.save == PIPE
    selftest = Proof(environment, runs=runs, timeout=DEFAULT_TIMEOUT)
    selftest.working = testing(silent=silent)
    results = examine(environment, selftest=selftest, choice=choice)
    return _report(args, environment, results, choice=choice, record=record)


def choose_checks(args: argparse.Namespace, *, what_if: bool = False) -> CheckChoice:
    """Return the checks that the options select.

    Raises:
        UsageError: A name is unknown, or no check is left.
    """
    skip = args.skip | ({"selftest"} if args.no_selftest and not args.gpu else set())
    choice = CheckChoice(args.only, skip, args.devices)
    choice.require_known(check_names(what_if=what_if or bool(args.gpu)))
    return choice


def run_libraries(args: argparse.Namespace, record: Record | None = None) -> int:
    """Judge the named libraries, print results as they arrive, and return the exit code."""
    if args.gpu:
        environment = imagine(args, record, Installed())
    elif record:  # no library can be loaded on the recorded machine
        environment = replace(record.environment, installed=Installed(), what_if=True)
    else:
        environment = gather_gpus()
    environment = limit_gpus(environment, args.devices)
    with ExitStack() as stack:
        progress = stack.enter_context(downloading())
        artefacts = [
            stack.enter_context(at_hand(place, environment, progress=progress))
            for place in args.wheel
        ]
        groups: list[tuple[str, Iterable[Library | Unread]]] = [
            (one.path.name, open_libraries(one.path)) for one in artefacts
        ]
        if args.package:  # installed packages share a folder: judge them together
            groups.insert(0, ("what is installed", chain(*map(package_libraries, args.package))))
        listings = (artefact.listing for artefact in artefacts if artefact.listing)
        results = _judge_each(environment, groups)
        return _report(args, environment, chain(listings, results), record=record)


def _judge_each(
    environment: Environment, groups: Sequence[tuple[str, Iterable[Library | Unread]]]
) -> Iterator[CheckResult]:
    """Judge each group separately: code in one wheel does not help if another wheel lacks it."""
    for number, (name, libraries) in enumerate(groups):
        for result in examine_libraries(environment, libraries):
            if result.name not in _OF_MACHINE:
                told = f"{name}: {result.summary}" if len(groups) > 1 else result.summary
                yield replace(result, summary=told)
            elif number == 0:
                yield result


def _report(
    args: argparse.Namespace,
    environment: Environment,
    results: Iterator[CheckResult],
    *,
    choice: CheckChoice = EVERYTHING,
    record: Record | None = None,
) -> int:
    silent = args.json or args.save == PIPE
    shown = tuple(_show(results, args, silent=silent))
    examination = Examination(environment, shown, choice, record.origin if record else None)
    code = examination.exit_code(strict=args.strict)
    document = examination.to_json(strict=args.strict) if args.json or args.report else {}
    if args.save:
        save_record(args.save, environment, examination.results, choice)
    if args.report:
        write_report(args.report, document)
    if args.json:
        print(json.dumps(document, indent=2))
    elif not silent:
        make_console().print(f"{'' if args.quiet else chr(10)}{describe_end(examination, code)}")
    return code


def _show(
    results: Iterator[CheckResult], args: argparse.Namespace, *, silent: bool
) -> Iterator[CheckResult]:
    console = make_console()
    fixes = ShownFixes()
    first: CheckResult | None = None
    for result in results:
        shown = result
        if first is not None and not args.verbose:
            shown = fold(result, first)
        if not silent and is_shown(result, quiet=args.quiet):
            print_result(console, fixes.shorten(shown), verbose=args.verbose)
        if result.gpu is not None and shown is result:
            first = result
        yield result


class ShownFixes:
    """The fixes printed so far. A later result with the same fix only refers to the first one."""

    def __init__(self) -> None:
        self._first: dict[str, CheckResult] = {}

    def shorten(self, result: CheckResult) -> CheckResult:
        """Replace a repeated fix with a reference to the first; omit a repeated explanation."""
        first = self._first.setdefault(result.fix, result)
        if not result.fix or first is result:
            return result
        fix = f"same as {'above' if first.name == result.name else first.name}"
        entry = None if result.entry is first.entry else result.entry
        return replace(result, fix=fix, entry=entry)


def fold(result: CheckResult, first: CheckResult) -> CheckResult:
    """Replace long details with a reference if `first`, an earlier GPU's result, has the same."""
    kinds = {one.name.split()[0] for one in (result, first)}
    same = (result.status, result.all_details) == (first.status, first.all_details)
    shown = result.all_details if result.status == "fail" else result.details
    if len(kinds) == 1 and same and len(shown) > _FOLDED:
        return replace(result, details=(f"same details as {first.name}",), background=())
    return result


def describe_end(examination: Examination, code: int) -> str:
    """Return one line: the numbers of results by status, the conclusion and the exit status."""
    counts = Counter(result.status for result in examination.results)
    statuses: tuple[Status, ...] = ("ok", "warn", "fail", "skip")
    counted = ", ".join(f"{counts[one]} {one}" for one in statuses if counts[one])
    reason = "warnings count as failures" if code == 1 and not counts["fail"] else _CONCLUSION[code]
    if code == EXIT_NOTHING_CHECKED and not examination.environment.cuda.gpus:
        reason += ": there is no GPU"
    return f"{counted}: {reason} (exit status {code})"
