"""`fleet`: runs the selftest on every rank's GPU, and compares the results."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from ..checks.environment import gather_gpus
from ..doctor.proof import Proof
from ..doctor.rank import Rank, join_ranks, prove_rank
from ..findings.result import CheckResult, exit_code, worst_status
from ..machine.installed import read_installed
from ..product import NAME
from ..selftest.fleet import Member, compare_members
from ..selftest.run import CHILD, DEFAULT_RUNS, DEFAULT_TIMEOUT
from ..selftest.side_by_side import write_seconds
from .options import add_json, add_runs, add_strict, add_subcommand, parse_number
from .terminal.progress import testing
from .terminal.results import is_shown, make_console, print_result
from .terminal.signals import ending_at_once
from .terminal.text import complain, printable

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from .options import Subparsers

EPILOG = f"""\
examples:
  torchrun --nproc-per-node=gpu -m {NAME} fleet
  torchrun --nproc-per-node=gpu -m {NAME} fleet --rounds 10

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check
"""

BACKENDS: Final = ("gloo", "nccl")
SELDOM: Final = 10.0  # minimum seconds between two lines of a log


def add_parser(subparsers: Subparsers) -> None:
    """Add the parser of the subcommand."""
    parser = add_subcommand(
        subparsers,
        "fleet",
        summary="under torchrun: test the GPU of every rank, and that all compute the same bits",
        description="Run the selftest on the GPU of every rank that torchrun started, on one host "
        "or many, and compare what equal GPUs computed. A GPU that differs from its equals "
        "corrupts data without any error.",
        epilog=EPILOG,
    )
    add_runs(parser, DEFAULT_RUNS)
    hint = "`--rounds 10` repeats the selftest ten times"
    parser.add_argument(
        "--rounds",
        type=partial(parse_number, what="rounds", least=1, hint=hint),
        metavar="N",
        default=1,
        help="how often, for a burn-in; the first one shows how long all take (default: "
        "%(default)s)",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default=BACKENDS[0],
        help="what carries the fingerprints (default: %(default)s)",
    )
    add_strict(parser)
    add_json(parser, "doctor")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, child: Sequence[str] = CHILD) -> int:
    """Test this rank's GPU, gather the results of all ranks, and let rank 0 report.

    Args:
        args: The options.
        child: Arguments of Python that start the selftest's child process.
    """
    runs = args.runs or DEFAULT_RUNS
    rank = Rank.of_environment()
    with ending_at_once():  # other ranks may be late or absent
        dist = join_ranks(rank, args.backend)
    environment = gather_gpus(read_installed())
    proof = Proof(environment, runs=runs, timeout=DEFAULT_TIMEOUT, child=child)

    def run_round(number: int, say: Callable[[str], None]) -> list[Any]:
        proof.working = lambda _: nullcontext(say)
        mine = prove_rank(rank, environment, proof, runs=runs, child=child)
        say(f"waiting for all {rank.world} ranks")
        everyone: list[Any] = [None] * rank.world
        with ending_at_once():
            dist.all_gather_object(everyone, replace(mine, round=number))
        return everyone

    members: list[Member] = []
    silent = bool(rank.rank) or args.json
    began = time.monotonic()
    try:
        for number in range(args.rounds):
            name = f"round {number + 1} of {args.rounds}"
            with testing(silent=silent, every=SELDOM)(name) as say:
                members += run_round(number, partial(_say, say, name))
            if args.rounds > 1 and not silent:
                said = describe_rounds(members, args.rounds, time.monotonic() - began)
                complain(printable(f"{name}: {said}"))
    finally:
        dist.destroy_process_group()
    return 0 if rank.rank else _report(rank, members, args)  # rank 0 reports for all


def _say(say: Callable[[str], None], name: str, text: str) -> None:
    say(f"{name}: {text}")


def describe_rounds(members: Sequence[Member], rounds: int, seconds: float) -> str:
    """Describe the rounds so far, and estimate the time for the remaining rounds.

    Args:
        members: The results of all ranks in the rounds so far.
        rounds: Total number of rounds, including the remaining ones.
        seconds: Duration of the rounds so far.
    """
    said = f"{compare_members(members)[-1].summary}; {write_seconds(seconds)}"
    done = members[-1].round + 1
    left = seconds * (rounds - done) / done
    return f"{said}, about {write_seconds(left)} left" if left else said


def _report(rank: Rank, members: list[Member], args: argparse.Namespace) -> int:
    results = compare_members(members)
    tested = any(member.gpu for member in members)
    code = exit_code(results, checked_gpu=tested, strict=args.strict)
    if args.json:
        print(json.dumps(to_json(members, results, code), indent=2))
        return code
    console = make_console()
    sound = [member for member in members[: rank.world] if member.result]
    for result in (*map(_describe, sound), *results[:-1]):  # failures are in `results`
        if is_shown(result, quiet=args.quiet):
            print_result(console, result)
    print_result(console, results[-1])
    return code


def _describe(member: Member) -> CheckResult:
    summary = f"{member.where}: {member.result.summary}"
    return CheckResult(member.result.status, summary, name=f"rank {member.rank}")


def to_json(
    members: list[Member], results: tuple[CheckResult, ...], code: int
) -> dict[str, object]:
    """Return rank 0's report as plain data."""
    return {
        "version": 1,
        "command": "doctor --fleet",
        "status": worst_status(results),
        "exit_code": code,
        "members": [
            {
                "rank": member.rank,
                "round": member.round,
                "host": member.host,
                "gpu": member.gpu.to_json() if member.gpu else None,
                "selftest": member.result.to_json(),
            }
            for member in members
        ],
        "checks": [result.to_json() for result in results],
    }
