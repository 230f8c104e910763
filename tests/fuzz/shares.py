"""Common code of the programs here that draw random problems.

Processes share the cases. A finding is printed at once. A watchdog names a case that does not end,
and ends its process. The program then ends, too.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterable, Iterator, Sequence

Tensor = torch.Tensor
DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
PATIENCE: Final = 60.0  # seconds
HANGS: Final = 3  # exit status of a process in which a case hangs


class Checked(NamedTuple):
    """Result of a case."""

    found: list[str]  # findings
    digest: str  # digest of the bits of the case's results


@dataclass(frozen=True)
class Share:
    """The work of one process."""

    numbers: Sequence[int]
    draw: Callable[[int], object]  # makes the case with a given number
    check: Callable[[Any], Checked]
    deadline: float  # of time.time()
    patience: float  # seconds per case
    threads: int  # torch's CPU threads


class Done(NamedTuple):
    """Results of one process."""

    cases: int
    findings: int
    digests: dict[str, str]  # of the cases without findings


def add_options(parser: argparse.ArgumentParser, *, cases: int) -> None:
    """Add the options of every program."""
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after (default 300)")
    parser.add_argument("--cases", type=int, default=cases, help=f"at most (default {cases})")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one case alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help=f"for a case, seconds ({PATIENCE:g})"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--dtype", action="append", choices=tuple(DTYPES), help="not all")
    parser.add_argument("--bits", type=Path, metavar="FILE", help="digests to write or to compare")


def run_program(
    args: argparse.Namespace, draw: Callable[[int], object], check: Callable[[Any], Checked]
) -> int:
    """Check the selected cases, print findings, and return the exit status."""
    deadline = time.time() + args.seconds
    threads = max(torch.get_num_threads() // args.jobs, 1)
    numbers = range(args.cases) if args.only is None else range(args.only, args.only + 1)
    shares = [
        Share(numbers[first :: args.jobs], draw, check, deadline, args.patience, threads)
        for first in range(args.jobs)
    ]
    try:
        done = _run_shares(shares)
    except BrokenProcessPool:
        return HANGS  # the process has named the hanging case
    cases, findings = sum(one.cases for one in done), sum(one.findings for one in done)
    digests = {name: bits for one in done for name, bits in one.digests.items()}
    others = _compare_digests(args.bits, digests) if args.bits else []
    _print(*others, f"{cases} cases of seed {args.seed}, {findings + len(others)} findings")
    return int(bool(findings or others) or not cases)


def _run_shares(shares: Sequence[Share]) -> list[Done]:
    if len(shares) == 1:
        return [run_share(shares[0])]
    with ProcessPoolExecutor(len(shares), multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(run_share, shares))


def run_share(share: Share) -> Done:
    """Run cases until the time is over."""
    cases, findings, digests = 0, 0, {}
    torch.set_num_threads(share.threads)
    for number in share.numbers:
        if time.time() > share.deadline:
            break
        case = share.draw(number)
        try:
            with watched(case, share.patience):
                found, digest = share.check(case)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            found, digest = [f"{type(error).__name__}: {error}"], ""
        _print(*(f"{case}: {one}" for one in found))
        if not found:
            digests[str(case)] = digest
        cases, findings = cases + 1, findings + len(found)
    return Done(cases, findings, digests)


@contextlib.contextmanager
def watched(case: object, patience: float) -> Iterator[None]:
    """Name a case that does not end, and end the process: nothing else stops a kernel."""

    def give_up() -> None:
        _print(f"{case}: no end after {patience:g} s")
        faulthandler.dump_traceback(sys.stdout)  # shows the Python call, unless a kernel hangs
        os._exit(HANGS)

    watchdog = threading.Timer(patience, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Tell if two tensors of one dtype have equal bits, including NaN and the sign of 0."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def digest_of(tensors: Iterable[Tensor]) -> str:
    """Return 16 hexadecimal digits of the bits of some tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def _compare_digests(path: Path, digests: dict[str, str]) -> list[str]:
    """Write digests to a new file, or name the cases that differ from an existing file.

    A case without a digest in both is skipped: the time of one run may have ended before that case.
    """
    if not path.exists():
        path.write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
        return []
    known = json.loads(path.read_text(encoding="utf-8"))
    both = [name for name in digests if name in known]
    _print(f"{len(both)} cases are held against {path}")
    return [f"{name}: other bits than in {path}" for name in both if digests[name] != known[name]]


def choose_dtypes(args: argparse.Namespace, role: str = "fwd") -> tuple[str, ...]:
    """Return the dtypes of the options for which the installed build has kernels of a role."""
    asked = args.dtype or tuple(DTYPES)
    if args.device == "cpu":
        return tuple(name for name in DTYPES if name in asked)
    from flash_dist.toolkit.loading.library import variants  # noqa: PLC0415 - loads the kernels

    there = {variant["dtype"] for variant in variants() if variant["role"] == role}
    return tuple(name for name in DTYPES if name in there and name in asked)


def _print(*lines: str) -> None:
    """Print whole lines at once: several processes print, and a program may be stopped."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
