"""Compares the selftests of many GPUs on many machines: equal code on equal GPUs gives equal bits.

A GPU that computes wrong bits without an error corrupts data silently. The odd GPUs are those that
differ from the majority.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..findings import proofs as ids
from ..findings.result import CheckResult
from ..product import PROGRAM
from ..targets.wording import few_lines

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from ..machine.libcuda import Gpu
    from .fingerprints import Fingerprint, Setting

_SHOWN = 8


@dataclass(frozen=True)
class Member:
    """One rank: its machine, and the results of its GPU in one round."""

    rank: int
    host: str
    gpu: Gpu | None  # None: the rank has no GPU, or runs the reference path on the CPU
    setting: Setting
    fingerprints: tuple[Fingerprint, ...]
    result: CheckResult  # of the selftest, or the reason why it did not run
    round: int = 0  # index of the round

    @property
    def where(self) -> str:
        """Describe the GPU so that a person can find and replace it."""
        if self.gpu is None:
            return f"rank {self.rank} on {self.host}, CPU"
        uuid = f", {self.gpu.uuid}" if self.gpu.uuid else ""
        return (
            f"rank {self.rank} on {self.host}, gpu {self.gpu.index} "
            f"({self.gpu.name}, PCI {self.gpu.pci}{uuid})"
        )


@dataclass(frozen=True)
class Odd:
    """One tensor whose bits on a rank differ from the bits on the other ranks."""

    member: Member
    case: str
    tensor: str
    agreeing: int  # number of (rank, round) pairs with the most common bits
    certain: bool  # whether no other bits are as common


def compare_members(members: Iterable[Member]) -> tuple[CheckResult, ...]:
    """Compare all fingerprints that must be equal, over ranks and rounds.

    Returns:
        One result per failed selftest, one per odd GPU, and one for the whole fleet.
    """
    members = tuple(members)
    failed = [member for member in members if not member.result]
    yielded = [_describe_failure(member) for member in failed]
    odd: defaultdict[int, list[Odd]] = defaultdict(list)
    compared = 0
    for group in _groups(members):
        compared += len(group) > 1
        for one in _find_odd(group):
            odd[one.member.rank].append(one)
    yielded += [_describe_odd(found) for _, found in sorted(odd.items())]
    return (*yielded, _sum_up(members, compared, failed=bool(failed), odd=len(odd)))


def _groups(members: Iterable[Member]) -> Iterator[list[tuple[Member, Fingerprint]]]:
    """Yield groups of fingerprints that must be equal, each fingerprint with its member."""
    groups: defaultdict[tuple[object, ...], list[tuple[Member, Fingerprint]]] = defaultdict(list)
    for member in members:
        for one in member.fingerprints:
            groups[member.setting, one.key].append((member, one))
    yield from groups.values()


def _find_odd(group: list[tuple[Member, Fingerprint]]) -> Iterator[Odd]:
    for tensor in group[0][1].digests:
        counts = Counter(one.digests[tensor] for _, one in group)
        if len(counts) == 1:
            continue
        (usual, most), (_, second) = counts.most_common(2)
        certain = most > second
        for member, one in group:
            if one.digests[tensor] != usual or not certain:
                yield Odd(member, one.case, tensor, most, certain)


def _describe_odd(found: list[Odd]) -> CheckResult:
    member = found[0].member
    places = sorted({(one.tensor, one.case) for one in found})
    tensor, case = places[0]
    certain = any(one.certain for one in found)
    against = f"{found[0].agreeing} others agree" if certain else "no result has a majority"
    rounds = sorted({one.member.round + 1 for one in found})
    details = [*few_lines([f"{one} in `{where}`" for one, where in places[1:]], _SHOWN)]
    if member.round or len(rounds) > 1:
        details.append(f"in rounds {', '.join(map(str, rounds))}")
    return CheckResult(
        "fail",
        f"{member.where} computed different bits: {tensor} in `{case}`; {against}",
        tuple(details),
        f"take this GPU out of the cluster and run `{PROGRAM} selftest --runs 1000` on it"
        if certain
        else "run the fleet with a third GPU of this model: the one that differs is faulty",
        ids.FLEET_ODD_GPU if certain else ids.FLEET_DISAGREES,
        name=f"rank {member.rank}",
        data={"rank": member.rank, "host": member.host, "differing": places},
    )


def _describe_failure(member: Member) -> CheckResult:
    result, name = member.result, f"rank {member.rank}"
    summary = f"{member.where}: {result.summary}"
    data = {"rank": member.rank, "host": member.host}
    return CheckResult(
        "fail", summary, result.all_details, result.fix, result.entry, name=name, data=data
    )


def _sum_up(members: tuple[Member, ...], compared: int, *, failed: bool, odd: int) -> CheckResult:
    ranks = len({member.rank for member in members})
    hosts = len({member.host for member in members})
    rounds = max((member.round for member in members), default=0) + 1
    kinds = Counter(
        member.gpu.name if member.gpu else "CPU" for member in members if not member.round
    )
    who = ", ".join(f"{count} x {name}" for name, count in sorted(kinds.items()))
    scope = f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''} ({who})"
    scope += f", {rounds} rounds" if rounds > 1 else ""
    data: dict[str, Any] = {"ranks": ranks, "hosts": hosts, "rounds": rounds, "compared": compared}
    if odd:
        summary = f"{scope}: {odd} of them computed different bits than equal ranks"
        return CheckResult("fail", summary, entry=ids.FLEET_DIFFERS, data=data, name="fleet")
    if not compared:
        summary = f"{scope}: no two ranks are equal, so nothing was compared"
        return CheckResult(
            "warn", summary, entry=ids.FLEET_NOTHING_TO_COMPARE, data=data, name="fleet"
        )
    summary = f"{scope}: the same bits in all {compared} cases"
    return CheckResult("warn" if failed else "ok", summary, data=data, name="fleet")
