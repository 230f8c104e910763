"""`fleet`: runs the selftest on every rank's GPU, and compares the results."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..checks.environment import gather_gpus
from ..doctor.proof import Proof
from ..doctor.rank import Rank, join_ranks, prove_rank
from ..errors import UsageError
from ..findings.result import CheckResult, exit_code, worst_status
from ..machine.installed import read_installed
from ..product import NAME
from ..selftest.fleet import Member, compare_members
from ..selftest.run import CHILD, DEFAULT_RUNS, DEFAULT_TIMEOUT
from ..targets.wording import read_whole
from .options import add_json, add_runs, add_strict, add_subcommand
from .terminal.results import is_shown, make_console, print_result
from .terminal.signals import ending_at_once

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from .options import Subparsers

EPILOG = f"""\
examples:
  torchrun --nproc-per-node=gpu -m {NAME} fleet
  torchrun --nproc-per-node=gpu -m {NAME} fleet --rounds 10

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check
"""

BACKENDS: Final = ("gloo", "nccl")
JSON_VERSION = 1


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
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
    parser.add_argument(
        "--rounds",
        type=parse_rounds,
        metavar="N",
        default=1,
        help="how often, for a burn-in (default: %(default)s)",
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


def parse_rounds(text: str) -> int:
    """Read a number of rounds."""
    number = read_whole(text, least=1)
    if number is None:
        message = f"rounds must be a number of at least 1, got `{text:.60}`"
        raise UsageError(message, hint="`--rounds 10` repeats the selftest ten times")
    return number


def run(args: argparse.Namespace) -> int:
    """Run the comparison that the command line asks for."""
    return run_fleet(
        FleetOptions(
            args.runs or DEFAULT_RUNS,
            args.rounds,
            args.backend,
            as_json=args.json,
            strict=args.strict,
            quiet=args.quiet,
        )
    )


@dataclass(frozen=True)
class FleetOptions:
    """Options of a comparison of ranks.

    Args:
        runs: Number of runs of each case.
        rounds: Number of runs of the whole selftest.
        backend: Backend of torch.distributed that transfers the fingerprints.
        as_json: Print JSON instead of sentences.
        strict: Count warnings as failures.
        quiet: Print warnings, failures and the last line only.
        child: The selftest's child process, see `run_selftest`.
    """

    runs: int
    rounds: int = 1
    backend: str = BACKENDS[0]
    as_json: bool = False
    strict: bool = False
    quiet: bool = False
    child: Sequence[str] = CHILD


def run_fleet(options: FleetOptions) -> int:
    """Test this rank's GPU, gather the results of all ranks, and let rank 0 report."""
    rank = Rank.of_environment()
    with ending_at_once():  # other ranks may be late or absent
        dist = join_ranks(rank, options.backend)
    environment = gather_gpus(read_installed())
    proof = Proof(environment, runs=options.runs, timeout=DEFAULT_TIMEOUT, child=options.child)
    members: list[Member] = []
    try:
        for number in range(options.rounds):
            mine = prove_rank(rank, environment, proof, runs=options.runs, child=options.child)
            everyone: list[Any] = [None] * rank.world
            with ending_at_once():
                dist.all_gather_object(everyone, replace(mine, round=number))
            members += everyone
            if rank.rank == 0 and options.rounds > 1 and not options.as_json:
                said = compare_members(members)[-1].summary
                print(f"round {number + 1} of {options.rounds}: {said}", flush=True)
    finally:
        dist.destroy_process_group()
    return 0 if rank.rank else _report(rank, members, options)  # rank 0 reports for all


def _report(rank: Rank, members: list[Member], options: FleetOptions) -> int:
    results = compare_members(members)
    tested = any(member.gpu for member in members)
    code = exit_code(results, checked_gpu=tested, strict=options.strict)
    if options.as_json:
        print(json.dumps(to_json(members, results, code), indent=2))
        return code
    console = make_console()
    shown = [*map(_describe, filter(_went_well, members[: rank.world])), *results[:-1]]
    for result in shown:
        if is_shown(result, quiet=options.quiet):
            print_result(console, result)
    print_result(console, results[-1])
    return code


def _went_well(member: Member) -> bool:
    return bool(member.result)  # the other ranks have a result already


def _describe(member: Member) -> CheckResult:
    summary = f"{member.where}: {member.result.summary}"
    return CheckResult(member.result.status, summary, name=f"rank {member.rank}")


def to_json(
    members: list[Member], results: tuple[CheckResult, ...], code: int
) -> dict[str, object]:
    """Return rank 0's report as plain data."""
    return {
        "version": JSON_VERSION,
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
