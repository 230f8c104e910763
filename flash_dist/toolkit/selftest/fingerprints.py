"""Fingerprints: hashes of the selftest's results, to compare between machines.

Bits must be equal if everything that decides them is equal: the case, its plan, the code of its
kernels, compute capability, number of multiprocessors, shared memory per block, and the driver if
it compiled the code. Two GPUs of one model may differ in multiprocessors (a MIG instance, a client
of MPS). Fingerprints are compared only if all of these are equal.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from ..binaries.json_text import parse_json
from ..builds.package import PACKAGE
from ..errors import KernelsError
from ..product import PROGRAM
from ..targets.archs import DEFAULT_TOOLKIT
from .report import hash_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from .report import SelftestReport

FILE_NAME: Final = "fingerprints.json"
VERSION: Final = 2


@dataclass(frozen=True, order=True)
class Setting:
    """Properties of the machine that decide the bits."""

    compute_capability: str  # "9.0"; for the reference path a description of the CPU
    sm_count: int  # multiprocessors visible to this process
    smem_limit: int  # bytes per block available to the dispatcher


@dataclass(frozen=True)
class Fingerprint:
    """The hashes of one case's results."""

    case: str
    plan: str  # hash of the chosen kernels and all other decisions
    code: str  # hash of these kernels' code
    driver: str  # release, if the driver compiled the code; else empty
    digests: Mapping[str, str]  # hash of each result by name, such as out, lse and dq

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Values that decide the bits in one setting: fingerprints with the same key must agree."""
        return self.case, self.plan, self.code, self.driver

    def differing(self, other: Fingerprint) -> tuple[str, ...]:
        """Return the names of the tensors that differ."""
        return tuple(name for name in self.digests if self.digests[name] != other.digests[name])


@dataclass(frozen=True)
class Reference:
    """The recorded fingerprints of one GPU."""

    gpu: str
    recorded: str  # date of the recording
    setting: Setting
    kernels: Mapping[str, str]  # code hash by symbol
    fingerprints: tuple[Fingerprint, ...]
    toolkit: str = DEFAULT_TOOLKIT  # CUDA version of the kernels' compiler

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Reference:
        """Read the reference from plain data."""
        return cls(
            str(data["gpu"]),
            str(data["recorded"]),
            Setting(**data["setting"]),
            dict(data["kernels"]),
            tuple(Fingerprint(**one) for one in data["fingerprints"]),
            str(data.get("toolkit", DEFAULT_TOOLKIT)),
        )


@dataclass(frozen=True)
class Mismatch:
    """One case whose bits differ but must be equal."""

    case: str
    tensors: tuple[str, ...]

    def __str__(self) -> str:
        return f"{', '.join(self.tensors)} in `{self.case}`"


@dataclass(frozen=True)
class Agreement:
    """The result of comparing one GPU's fingerprints with recorded ones."""

    cases: int
    compared: int = 0  # number of cases that have a comparable reference
    gpu: str = ""  # the recorded GPU
    recorded: str = ""  # date of the recording
    mismatches: tuple[Mismatch, ...] = ()
    nearest: str = ""  # text about recorded GPUs that differ only in multiprocessor count
    unread: str = ""  # why the kernels' code could not be read; "" if it was

    def __bool__(self) -> bool:
        return not self.mismatches

    @property
    def sentence(self) -> str:
        """A sentence about the result."""
        if self.unread:
            return f"not compared with recorded fingerprints, which needs the code: {self.unread}"
        if not self.compared:
            but = f": {self.nearest}" if self.nearest else ""
            return f"no recorded fingerprints for this GPU and these kernels{but}"
        where = f"{self.gpu}, recorded {self.recorded}"
        if self.mismatches:
            shown = str(self.mismatches[0])
            count = len(self.mismatches)
            return (
                f"{count} of {self.compared} cases differ from another {where} with the same "
                f"code: {shown}"
            )
        missing = self.cases - self.compared
        rest = f"; {missing} cases have no reference" if missing else ""
        return f"{self.compared} cases bit-identical to another {where}{rest}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "cases": self.cases,
            "compared": self.compared,
            "gpu": self.gpu or None,
            "recorded": self.recorded or None,
            "mismatches": [asdict(one) for one in self.mismatches],
            "unread": self.unread or None,
        }


def make_fingerprints(
    report: SelftestReport, kernels: Mapping[str, str], driver: str
) -> tuple[Fingerprint, ...]:
    """Join the selftest's results with the code of the kernels that it launched.

    If a case launched no kernel of a dispatcher, any code of the package may decide its bits.

    Args:
        report: The selftest's report.
        kernels: The hash of each kernel's code, by symbol.
        driver: The release of the driver.
    """
    return tuple(
        Fingerprint(
            one.case,
            one.plan.digest,
            hash_code(one.plan.kernels or sorted(kernels), kernels),
            driver if is_compiled_by_driver(one.plan.kernels) else "",
            one.digests,
        )
        for one in report.digests
    )


def is_compiled_by_driver(symbols: Iterable[str]) -> bool:
    """Tell if the driver compiled one of these kernels from PTX; True without symbols."""
    names = list(symbols)
    return not names or any("_compute" in symbol for symbol in names)


def hash_code(symbols: Iterable[str], kernels: Mapping[str, str]) -> str:
    """Return one hash of several kernels' code; `-` stands for unknown code of a kernel."""
    text = "".join(f"{symbol} {kernels.get(symbol, '-')}\n" for symbol in symbols)
    return hash_bytes(text.encode())


def compare_with(
    references: Sequence[Reference], setting: Setting, own: tuple[Fingerprint, ...]
) -> Agreement:
    """Compare fingerprints with the reference of the same setting that shares the most cases."""
    best = Agreement(len(own), nearest=_find_nearest(references, setting))
    for reference in references:
        if reference.setting != setting:
            continue
        compared, mismatches = compare_prints(reference.fingerprints, own)
        if compared > best.compared:
            best = Agreement(len(own), compared, reference.gpu, reference.recorded, mismatches)
    return best


def _find_nearest(references: Iterable[Reference], setting: Setting) -> str:
    counts = {
        reference.setting.sm_count
        for reference in references
        if replace(reference.setting, sm_count=setting.sm_count) == setting
    }
    if not counts or setting.sm_count in counts:
        return ""
    known = " and ".join(map(str, sorted(counts)))
    return f"the recorded ones have {known} multiprocessors, this GPU has {setting.sm_count}"


def compare_prints(
    theirs: Iterable[Fingerprint], own: Iterable[Fingerprint]
) -> tuple[int, tuple[Mismatch, ...]]:
    """Compare fingerprints of one setting. Return how many were comparable, and the mismatches."""
    known = {one.case: one for one in theirs}
    pairs = [
        (his, one) for one in own if (his := known.get(one.case)) is not None and one.key == his.key
    ]
    mismatches = tuple(
        Mismatch(one.case, tensors) for his, one in pairs if (tensors := his.differing(one))
    )
    return len(pairs), mismatches


def read_references(path: Path = PACKAGE / FILE_NAME) -> tuple[Reference, ...]:
    """Read recorded fingerprints; empty if the package has no such file.

    Raises:
        KernelsError: The file cannot be read, or has the format of another version.
    """
    hint = f"`{PROGRAM} selftest --record FILE` writes one"
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if path == PACKAGE / FILE_NAME:
            return ()
        message = f"the fingerprint file `{path}` does not exist"
        raise KernelsError(message, hint=hint) from error
    except (OSError, ValueError, RecursionError) as error:
        message = f"cannot read fingerprints from `{path}`: {error}"
        raise KernelsError(message, hint=hint) from error
    try:
        if data["version"] != VERSION:
            message = f"fingerprints must have version {VERSION}, got {data['version']} in `{path}`"
            raise KernelsError(message, hint=hint)
        return tuple(map(Reference.from_json, data["references"]))
    except (KeyError, TypeError, AttributeError) as error:
        message = f"`{path}` is not a valid fingerprint file: {error}"
        raise KernelsError(message, hint=hint) from error


def render_references(references: Iterable[Reference]) -> str:
    """Return the file's text, one line per case; the same fingerprints give the same text."""
    blocks = []
    for reference in references:
        data = asdict(reference)
        hashes = (f"{json.dumps(k)}: {json.dumps(v)}" for k, v in data.pop("kernels").items())
        kernels = ",\n   ".join(sorted(hashes))
        prints = ",\n   ".join(map(json.dumps, data.pop("fingerprints")))
        head = json.dumps(data)[:-1]
        blocks.append(
            f'{head},\n  "kernels": {{\n   {kernels}\n  }},\n'
            f'  "fingerprints": [\n   {prints}\n  ]}}'
        )
    text = ",\n ".join(blocks)
    return f'{{"version": {VERSION}, "references": [\n {text}\n]}}\n'


def write_references(path: Path, references: Iterable[Reference]) -> None:
    """Write recorded fingerprints."""
    path.write_text(render_references(references), encoding="utf-8")


def merge_references(
    known: Iterable[Reference], recorded: Iterable[Reference]
) -> tuple[Reference, ...]:
    """Merge references; a new one replaces one of the same GPU, setting, drivers and toolkit."""

    def key(reference: Reference) -> tuple[object, ...]:
        drivers = sorted({one.driver for one in reference.fingerprints})
        return (reference.gpu, reference.setting, tuple(drivers), reference.toolkit)

    merged = {key(one): one for one in known}
    merged.update({key(one): one for one in recorded})
    return tuple(merged[one] for one in sorted(merged, key=str))
