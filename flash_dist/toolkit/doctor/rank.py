"""Describes one rank of a fleet that torchrun started, and runs its GPU's selftest."""

from __future__ import annotations

import datetime as dt
import os
import platform
import socket
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..checks.gpus import check_gpu
from ..errors import GroupError, UsageError
from ..findings.proofs import FLEET_TOO_MANY_RANKS
from ..findings.result import CheckResult, guard
from ..machine.torch_install import read_torch
from ..product import NAME
from ..selftest.fingerprints import Setting, make_fingerprints
from ..selftest.fleet import Member
from ..selftest.run import CHILD, DEFAULT_TIMEOUT, check_selftest
from ..targets.wording import read_whole
from .proof import run_on_cpu

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..checks.environment import Environment
    from ..selftest.report import SelftestReport
    from .proof import Proof

LAUNCHER: Final = f"torchrun --nproc-per-node=gpu -m {NAME} fleet"

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
_VARIABLES = (*_NUMBERS, "MASTER_ADDR", "MASTER_PORT")
_SLACK = 600.0  # seconds to wait for the slowest rank, in addition to the selftest's timeout


@dataclass(frozen=True)
class Rank:
    """This process, which torchrun started together with the other ranks."""

    rank: int
    local: int
    world: int

    @classmethod
    def of_environment(cls) -> Rank:
        """Read torchrun's variables.

        Raises:
            UsageError: A variable is missing, because torchrun did not start this process, or is
                not a number.
        """
        missing = [name for name in _VARIABLES if not os.environ.get(name)]
        if missing:
            message = f"a fleet must be started by torchrun, got no {missing[0]}"
            raise UsageError(message, hint=f"`{LAUNCHER}`; with --nnodes for several machines")
        for name in _NUMBERS:
            if read_whole(os.environ[name]) is None:
                message = f"{name} must be a number, got `{os.environ[name]:.60}`"
                raise UsageError(message, hint=f"`{LAUNCHER}` sets it")
        return cls(*(int(os.environ[name]) for name in _NUMBERS))


def join_ranks(rank: Rank, backend: str) -> Any:  # noqa: ANN401 - torch.distributed is not typed
    """Join the other ranks; return torch.distributed, which exchanges values with them.

    Raises:
        GroupError: torch is absent or broken, finds no GPU for nccl, or cannot connect the ranks.
    """
    found = read_torch()
    if found.status != "ok":
        message = f"a fleet needs torch.distributed: {found.reason}"
        raise GroupError(message, hint=found.advise())
    import torch  # noqa: PLC0415 - the only use of torch in doctor's own process

    if backend == "nccl" and not torch.cuda.is_available():
        message = f"a fleet with nccl needs a GPU that torch can use, got none on rank {rank.rank}"
        raise GroupError(message, hint="`--backend gloo` needs none")
    dist: Any = torch.distributed
    patience = dt.timedelta(seconds=DEFAULT_TIMEOUT + _SLACK)
    try:
        if backend == "nccl":
            torch.cuda.set_device(rank.local)
        dist.init_process_group(backend, timeout=patience)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        message = f"rank {rank.rank} of {rank.world} cannot join its fleet with {backend}: {reason}"
        raise GroupError(message, hint=f"`{LAUNCHER}` sets the address of the ranks") from error
    return dist


def prove_rank(
    rank: Rank, environment: Environment, proof: Proof, *, runs: int, child: Sequence[str] = CHILD
) -> Member:
    """Run one round of the selftest on this rank's GPU, or on the CPU if the machine has no GPU.

    Args:
        rank: This process.
        environment: The machine of this process.
        proof: Shared by all rounds, so that the library is read once.
        runs: Number of runs of each case.
        child: Arguments of Python for the selftest's child process; see `run_selftest`.
    """
    host = socket.gethostname()
    gpus = environment.cuda.gpus
    if not gpus:
        report = run_on_cpu(runs, timeout=DEFAULT_TIMEOUT, working=proof.working, child=child)
        return _describe_cpu(rank, host, environment, report)
    nobody = Setting("none", 0, 0)
    if rank.local >= len(gpus):
        summary = f"there are {len(gpus)} GPUs and this is local rank {rank.local}"
        fix = f"start one rank per GPU: `{LAUNCHER}`"
        result = CheckResult("fail", summary, fix=fix, entry=FLEET_TOO_MANY_RANKS, name="gpu")
        return Member(rank.rank, host, None, nobody, (), result)
    gpu = gpus[rank.local]
    verdict = replace(check_gpu(environment, gpu), name=f"gpu {gpu.index}", gpu=gpu.index)
    if not verdict.is_usable:
        return Member(rank.rank, host, gpu, nobody, (), verdict)
    before = len(proof.proven)  # if this round fails, ignore earlier results
    with proof.side_by_side((gpu,)):  # shows progress
        (result,) = guard(f"selftest {gpu.index}", lambda: proof.run(gpu), gpu=gpu.index)
    _, setting, own = proof.proven[-1] if proof.proven[before:] else (gpu, nobody, ())
    return Member(rank.rank, host, gpu, setting, own, replace(result, data={}))


def _describe_cpu(
    rank: Rank, host: str, environment: Environment, report: SelftestReport
) -> Member:
    """Return the member for a rank without a GPU; its setting describes its CPU and torch."""
    where = f"cpu of {host}, {platform.machine()}, torch {environment.torch.version}"
    own = make_fingerprints(report, {}, "")
    result = replace(check_selftest(report), data={}, name="selftest cpu")
    return Member(rank.rank, host, None, Setting(where, 0, 0), own, result)
