"""Data classes for the results of the selftest of one device."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from ..findings.result import Finding

if TYPE_CHECKING:
    import ctypes
    from collections.abc import Mapping, Sequence

_DIGITS: Final = 32


def hash_bytes(data: bytes | ctypes.Array[ctypes.c_char]) -> str:
    """Return the first 128 bits of the SHA-256, in hexadecimal.

    The other bits are left out because a wheel has thousands of hashes.
    """
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


@dataclass(frozen=True)
class CaseFinding(Finding):
    """A failure of one case, or of a run that ended during the case."""

    case: str = ""
    difference: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain data."""
        return {
            "id": self.id,
            "case": self.case or None,
            "summary": self.summary,
            "details": list(self.details),
            "difference": self.difference,
            "docs": self.entry.page,
        }


@dataclass(frozen=True, order=True)
class RanVariant:
    """A variant that really ran, as described by the CUDA runtime."""

    symbol: str
    binary_version: int  # compute capability of the loaded SASS, times 10
    ptx_version: int  # target of the PTX that the SASS was made from, times 10

    def __str__(self) -> str:
        return f"{self.symbol}: binaryVersion {self.binary_version}, ptxVersion {self.ptx_version}"


@dataclass(frozen=True)
class CasePlan:
    """A hash of the library's decisions in one case, and the kernels that the case launched."""

    digest: str = ""  # empty on the CPU
    kernels: tuple[str, ...] = ()  # symbols in ascending order

    @classmethod
    def of(cls, plans: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]) -> CasePlan:
        """Hash the library's records, and the case's description of its inputs."""
        text = json.dumps([plans, inputs], sort_keys=True)
        kernels = {str(one["kernel"]) for one in plans if "kernel" in one}
        return cls(hash_bytes(text.encode()), tuple(sorted(kernels)))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, as in the child process's report."""
        return {"plan": self.digest, "kernels": list(self.kernels)}


@dataclass(frozen=True)
class CaseDigests:
    """The hashes of one case's results, and its plan."""

    case: str
    plan: CasePlan
    digests: dict[str, str]


@dataclass(frozen=True)
class SelftestReport:
    """Results of the selftest of one device."""

    device: str  # "0", "cpu"
    runs: int  # number of runs of each case
    cases: int  # number of cases that were completed
    findings: tuple[CaseFinding, ...] = ()
    loaded: tuple[RanVariant, ...] = ()
    selected: dict[str, str] | None = None  # "fwd fp16 64" -> symbol; None: no dispatcher was used
    roles: tuple[str, ...] = ()  # of the kernels that ran
    imported: bool = True  # whether the compiled parts were loaded
    seconds: float = 0.0
    digests: tuple[CaseDigests, ...] = ()

    def __bool__(self) -> bool:
        return not self.findings

    @property
    def untested(self) -> tuple[str, ...]:
        """The roles for which the dispatcher selected kernels, but no case launched one."""
        known = {kernel.split()[0] for kernel in self.selected or ()}
        return tuple(sorted(known - set(self.roles)))

    @property
    def summary(self) -> str:
        """The result in one sentence."""
        if self.findings:
            first = self.findings[0]
            where = f" ({first.case})" if first.case else ""
            more = len(self.findings) - 1
            tail = f"; {more} more finding{'s' if more > 1 else ''}" if more else ""
            return f"{first.summary}{where}{tail}"
        return (
            f"{self.cases} cases, {self.runs} runs each: {self.tensors} bit-equal and "
            f"values right ({self.seconds:.0f} s)"
        )

    @property
    def tensors(self) -> str:
        """The names of the tensors that at least half of the cases compute."""
        counts = Counter(name for one in self.digests for name in one.digests)
        common = [name for name, count in counts.items() if 2 * count >= len(self.digests)]
        return ", ".join(common) or "results"

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "device": self.device,
            "status": "ok" if self else "fail",
            "runs": self.runs,
            "cases": self.cases,
            "seconds": round(self.seconds, 3),
            "summary": self.summary,
            "findings": [finding.to_json() for finding in self.findings],
            "loaded": list(map(asdict, self.loaded)),
            "selected": self.selected,
            "untested_families": list(self.untested),
        }
