"""Predicts whether libraries of any package load here; yields a result for each that does not.

A package may hold a library for each CUDA release and load only one of them. So a missing
dependency is a failure only if no library of the package loads.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..binaries.segments import is_shared
from ..errors import FatbinError
from ..findings.driver import DRIVER_ABSENT
from ..findings.install import TORCH_ABSENT
from ..findings.loading import LIBRARY_MISSING, PYTHON_ABI, WRONG_ARCHITECTURE
from ..findings.result import CheckResult
from ..loading.linker import read_host
from ..loading.prediction import Prediction, predict_loading, predict_member
from ..loading.tags import judge_tags
from ..targets.wording import few_lines

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ..findings.result import Finding
    from ..gpucode.archives import Library
    from ..loading.linker import LoadHost
    from .environment import Environment

# Causes that do no harm if another library of the same package loads.
_REPLACEABLE = {LIBRARY_MISSING, WRONG_ARCHITECTURE, PYTHON_ABI, DRIVER_ABSENT}
_SHOWN = 4


@dataclass
class LibraryLoading:
    """Collects libraries one by one, and reports at the end which will not load."""

    host: LoadHost
    _files: list[Path] = field(default_factory=list)
    _members: dict[str, list[tuple[str, Prediction]]] = field(default_factory=dict)

    @classmethod
    def make(cls, environment: Environment) -> LibraryLoading | None:
        """Return a collector; None for an imagined machine or a system whose loader is unknown."""
        if environment.what_if:
            return None
        try:
            return cls(read_host(environment.torch, environment.libc))
        except FatbinError:
            return None

    def look(self, library: Library) -> None:
        """Collect an open shared library; predict at once if it is a member of an archive."""
        if not is_shared(library.fatbin.data):
            return
        if not library.archive:
            self._files.append(Path(library.name))
            return
        if not library.siblings:
            return  # in a conda package, whose Python and C++ library conda installs
        data, names = library.fatbin.data, library.siblings
        with suppress(FatbinError):  # damage in parts that only the dynamic linker reads
            found = predict_member(library.name, data, names, self.host)
            self._members.setdefault(library.archive, []).append((library.name, found))

    def results(self) -> Iterator[CheckResult]:
        """Yield results for libraries that will not load: members of archives before files."""
        for archive, predicted in self._members.items():
            tags = judge_tags(Path(archive).name, self.host)
            if tags is not None:
                yield _describe(tags, installed=False)
            else:
                yield from _describe_all(predicted, installed=False)
        yield from _describe_all(list(self._predict_files()), installed=True)

    def _predict_files(self) -> Iterator[tuple[str, Prediction]]:
        names = [path.name for path in self._files]
        for path in self._files:
            with suppress(FatbinError):  # damage in parts that only the dynamic linker reads
                label = str(path)
                yield label, predict_loading(path, self.host, label=label, siblings=names)


def _describe_all(
    predicted: list[tuple[str, Prediction]], *, installed: bool
) -> Iterator[CheckResult]:
    """Say what prevents each library from loading; replaceable libraries share one result."""
    served = any(one for _, one in predicted)
    replaced: list[tuple[str, Prediction, Finding]] = []
    for name, one in predicted:
        found = [cause for cause in one.causes if installed or cause.entry != TORCH_ABSENT]
        if found and served and found[0].entry in _REPLACEABLE:
            replaced.append((name, one, found[0]))
        elif found:
            result = _describe(found[0], installed=installed)
            yield replace(result, data={"library": name, **one.to_json()})
    if replaced:
        yield _describe_replaced(replaced, len(predicted))


def _describe_replaced(replaced: list[tuple[str, Prediction, Finding]], count: int) -> CheckResult:
    lines = [cause.summary for _, _, cause in replaced]
    summary = (
        f"{len(replaced)} of {count} libraries will not load here (predicted), which is normal "
        "where a package has several builds and loads one"
    )
    details = few_lines(lines, _SHOWN)
    data = {"libraries": [one.to_json() for _, one, _ in replaced]}
    return CheckResult("skip", summary, details, entry=replaced[0][2].entry, data=data)


def _describe(cause: Finding, *, installed: bool) -> CheckResult:
    summary = f"{cause.summary} (predicted from symbol tables)"
    result = CheckResult("fail", summary, cause.details, cause.fix, cause.entry)
    if cause.entry == DRIVER_ABSENT:
        return replace(result, status="skip")
    if cause.entry == LIBRARY_MISSING and not installed:
        detail = "it may come with a dependency that is not installed here"
        return replace(result, status="warn", details=(*cause.details, detail))
    return result
