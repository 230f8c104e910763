"""`torchrun ... -m flash_dist fleet`: every rank proves its GPU, and all are compared."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..checks.environment import gather_gpus
from ..checks.gpus import check_gpu
from ..checks.guard import guard
from ..doctor.proof import Proof
from ..errors import UsageError
from ..findings.proofs import FLEET_TOO_MANY_RANKS
from ..findings.result import CheckResult, exit_code, worst_status
from ..machine.installed import read_installed
from ..selftest.fingerprints import Identity, Setting, make_fingerprints
from ..selftest.fleet import Member, compare_members
from ..selftest.run import CHILD, DEFAULT_RUNS, DEFAULT_TIMEOUT, check_selftest, run_selftest
from .options import add_json, add_runs, add_strict, add_subcommand
from .terminal.results import is_shown, make_console, print_result

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from ..checks.environment import Environment
    from .options import Subparsers

EPILOG = """\
examples:
  torchrun --nproc-per-node=gpu -m flash_dist fleet
  torchrun --nproc-per-node=gpu -m flash_dist fleet --rounds 10

exit status: 0 no failure, 1 at least one failure, 2 wrong usage, 3 no GPU to check
"""

BACKENDS: Final = ("gloo", "nccl")
LAUNCHER: Final = "torchrun --nproc-per-node=gpu -m flash_dist fleet"
JSON_VERSION = 1

_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLACK = 600.0  # seconds that ranks may wait for the slowest one


def add_parser(subparsers: Subparsers) -> None:
    """Describe the subcommand."""
    parser = add_subcommand(
        subparsers,
        "fleet",
        summary="under torchrun: prove the GPU of every rank, and that all compute the same bits",
        description="Run the selftest on the GPU of every rank that torchrun started, on one host "
        "or many, and compare what equal GPUs computed: one that differs from its equals corrupts "
        "data without any error.",
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
    if not text.isdecimal() or not int(text):
        message = f"rounds must be a number of at least 1, got `{text}`"
        raise UsageError(message, hint="`--rounds 10` repeats the selftest ten times")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Prove the fleet as the command line asks."""
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
class Rank:
    """This process among those that torchrun started."""

    rank: int
    local: int
    world: int

    @classmethod
    def of_environment(cls) -> Rank:
        """Read what torchrun sets."""
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            message = f"a fleet must be started by torchrun, got no {missing[0]}"
            raise UsageError(message, hint=f"`{LAUNCHER}`; with --nnodes for several machines")
        return cls(*(int(os.environ[name]) for name in _VARIABLES[:3]))


@dataclass(frozen=True)
class FleetOptions:
    """What is asked of a fleet.

    Args:
        runs: Of each case.
        rounds: How often the whole selftest is repeated.
        backend: Of torch.distributed, which carries the fingerprints.
        as_json: Print JSON instead of sentences.
        strict: Warnings count as failures.
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
    """Prove this rank's GPU, gather what all computed, and let rank 0 report."""
    rank = Rank.of_environment()
    dist = _join(rank, options.backend)
    environment = gather_gpus(read_installed())
    proof = Proof(environment, runs=options.runs, timeout=DEFAULT_TIMEOUT, child=options.child)
    members: list[Member] = []
    try:
        for number in range(options.rounds):
            mine = _prove(rank, environment, proof, options)
            everyone: list[Any] = [None] * rank.world
            dist.all_gather_object(everyone, replace(mine, round=number))
            members += everyone
            if rank.rank == 0 and options.rounds > 1 and not options.as_json:
                said = compare_members(members)[-1].summary
                print(f"round {number + 1} of {options.rounds}: {said}", flush=True)
    finally:
        dist.destroy_process_group()
    return 0 if rank.rank else _report(rank, members, options)  # rank 0 speaks for all


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
    return bool(member.result)  # of the others there is a result already


def _describe(member: Member) -> CheckResult:
    summary = f"{member.where}: {member.result.summary}"
    return CheckResult(member.result.status, summary, name=f"rank {member.rank}")


def _join(rank: Rank, backend: str) -> Any:  # noqa: ANN401 - torch.distributed is not typed
    import torch  # noqa: PLC0415 - the only part of doctor that needs it in its own process

    dist: Any = torch.distributed
    if backend == "nccl":
        torch.cuda.set_device(rank.local)
    patience = dt.timedelta(seconds=DEFAULT_TIMEOUT + _SLACK)
    dist.init_process_group(backend, timeout=patience)
    return dist


def _prove(rank: Rank, environment: Environment, proof: Proof, options: FleetOptions) -> Member:
    """Return what this rank's GPU computes in one round; the proof reads its library once."""
    host = socket.gethostname()
    gpus = environment.cuda.gpus
    if not gpus:
        return _prove_cpu(rank, host, environment, options)
    nobody = Setting("none", 0, 0, "")
    if rank.local >= len(gpus):
        summary = f"there are {len(gpus)} GPUs and this is local rank {rank.local}"
        fix = f"start one rank per GPU: `{LAUNCHER}`"
        result = CheckResult("fail", summary, fix=fix, entry=FLEET_TOO_MANY_RANKS, name="gpu")
        return Member(rank.rank, host, None, nobody, (), result)
    gpu = gpus[rank.local]
    verdict = replace(check_gpu(environment, gpu), name=f"gpu {gpu.index}", gpu=gpu.index)
    if not verdict.is_usable:
        return Member(rank.rank, host, gpu, nobody, (), verdict)
    before = len(proof.proven)  # a round that fails leaves nothing
    result = guard(f"selftest {gpu.index}", lambda: proof.run(gpu), gpu=gpu.index)
    _, setting, own = proof.proven[-1] if proof.proven[before:] else (gpu, nobody, ())
    return Member(rank.rank, host, gpu, setting, own, replace(result, data={}))


def _prove_cpu(rank: Rank, host: str, environment: Environment, options: FleetOptions) -> Member:
    """Without GPUs the reference path runs; its bits are those of one host and torch."""
    report = run_selftest("cpu", runs=options.runs, child=options.child)
    where = f"cpu of {host}, {platform.machine()}, torch {environment.torch.version}"
    own = make_fingerprints(report, Identity(), "")
    result = replace(check_selftest(report), data={}, name="selftest cpu")
    return Member(rank.rank, host, None, Setting(where, 0, 0, ""), own, result)


def to_json(
    members: list[Member], results: tuple[CheckResult, ...], code: int
) -> dict[str, object]:
    """Return what rank 0 says as plain data."""
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
