"""Loading of the compiled parts: predicted from symbol tables, or tried in a child (`child.py`)."""

from __future__ import annotations

import errno
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..binaries.view import MORE_FILES_HINT
from ..builds.package import PACKAGE
from ..errors import AccessError, FatbinError
from ..machine.torch_install import TORCH_PROBLEMS, Torch
from ..product import BINDING, HAS_DISPATCHER, KERNELS
from .linker import LoadHost, read_host
from .prediction import predict_loading
from .process import Outcome, python_command, run_child

if TYPE_CHECKING:
    from ..findings.entry import Entry

TIMEOUT = 120.0  # seconds

_UNMAPPED = "failed to map segment from shared object"  # part of the loader's message
_NO_MEMORY = ("std::bad_alloc", "Cannot allocate memory", "MemoryError")


@dataclass(frozen=True)
class Loading:
    """Result of loading the compiled parts, predicted or tried."""

    status: Literal["ok", "failed", "crashed", "unknown", "not-tried", "skipped"]
    stage: str = ""  # the part that failed: "kernels", "torch" or "extension"
    reason: str = ""
    source: Literal["tried", "predicted"] = "tried"
    entry: Entry | None = None  # entry of a predicted cause
    fix: str = ""
    details: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The stable name of a predicted cause; empty if there is none."""
        return self.entry.id if self.entry else ""

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {
            "status": self.status,
            "source": None if self.status == "not-tried" else self.source,
            "stage": self.stage or None,
            "id": self.id or None,
            "reason": self.reason or None,
            "fix": self.fix or None,
            "details": list(self.details),
        }


def predict_parts(torch: Torch, libc: str, oldest: str, package: Path = PACKAGE) -> Loading:
    """Predict what `try_loading` would find, from symbol tables, part by part.

    Args:
        torch: The installed torch.
        libc: The C library, such as "glibc 2.36".
        oldest: Oldest torch that the build supports.
        package: Folder of the parts.
    """
    doubt = None
    try:
        host = read_host(torch, libc)
    except FatbinError as error:
        return Loading("unknown", reason=error.message, source="predicted")
    for stage, path in _find_parts(package, host):
        found = _predict_part(stage, path, host, oldest)
        if found.status == "failed":
            return found
        if found.status == "unknown" and doubt is None:
            doubt = found
    return doubt or Loading("ok", source="predicted")


def _predict_part(stage: str, path: Path, host: LoadHost, oldest: str) -> Loading:
    torch = host.torch
    if stage == "torch" and torch.status != "ok":
        entry, fix = TORCH_PROBLEMS[torch.status], torch.advise(oldest)
        return Loading("failed", stage, torch.reason, "predicted", entry, fix)
    try:
        prediction = predict_loading(path, host, torch_min=oldest)
    except FatbinError as error:
        denied = isinstance(error.__cause__, PermissionError)
        sure = denied or (stage != "torch" and not isinstance(error, AccessError))
        fix = (error.hint or "") if isinstance(error, AccessError) else ""
        return Loading("failed" if sure else "unknown", stage, error.message, "predicted", fix=fix)
    if not prediction:
        first = prediction.causes[0]
        reason, rest = first.summary, (first.entry, first.fix, first.details)
        return Loading("failed", stage, reason, "predicted", *rest)
    if prediction.unknown:
        return Loading("unknown", stage, prediction.unknown[0], "predicted")
    return Loading("ok", stage, source="predicted")


def _find_parts(package: Path, host: LoadHost) -> tuple[tuple[str, Path], ...]:
    """Return the parts in loading order, with the names of the stages."""
    extensions = host.torch_extensions()
    torch = extensions[0] if extensions else Path("torch")
    kernels = (("kernels", package / KERNELS),) if HAS_DISPATCHER else ()
    return (*kernels, ("torch", torch), ("extension", package / BINDING))


def try_loading() -> Loading:
    """Load the compiled parts in a child process, where a crash does no harm."""
    outcome = run_child(python_command("-m", f"{__package__}.child"), timeout=TIMEOUT)
    loading = judge_loading(outcome)
    if loading.status == "ok":
        return loading
    return replace(loading, fix=_find_outer_cause(outcome, loading.reason))


def _find_outer_cause(outcome: Outcome, reason: str) -> str:
    """Return the remedy for a cause outside of the install; empty for any other cause."""
    if _UNMAPPED in reason:
        return f"`findmnt -T {PACKAGE}` must not say noexec, and `ulimit -v` must leave room for it"
    if outcome.detail == "SIGKILL" or any(word in reason for word in _NO_MEMORY):
        return "give it more memory or time: `ulimit -a` shows the limits, `free -h` what is left"
    if outcome.ending == "not-started" and os.strerror(errno.EMFILE) in outcome.detail:
        return MORE_FILES_HINT
    if not _is_spelled(PACKAGE):
        encoding = sys.getfilesystemencoding()
        return f"`export PYTHONUTF8=1`: such a path cannot be written in {encoding}"
    try:
        Path.cwd()
    except OSError:  # in a deleted folder MKL fails, with an error that blames torch
        return "`cd /` and run it again: the folder that this was started in is gone"
    return ""


def _is_spelled(path: Path) -> bool:
    """Tell if torch can pass a path to C++, as it does for modules that register operators."""
    try:
        str(path).encode()
    except UnicodeEncodeError:  # the path has bytes that Python could not decode
        return False
    return True


def judge_loading(outcome: Outcome) -> Loading:
    """Turn the child's report into a result."""
    stage = ""
    for event in outcome.events:
        stage = str(event.get("stage", stage))
        if event.get("event") == "failed":
            return Loading("failed", stage, str(event.get("reason", "")))
        if event.get("event") == "loaded":
            return Loading("ok")
    said = f"; it printed `{outcome.output[-1]}`" if outcome.output else ""
    return Loading("crashed", stage, f"{outcome.sentence}{said}")
