"""Checks libraries of any package, including ours, against the GPUs of a real or imagined machine.

If only some fatbins of a library have code for a GPU, that is a warning, not a failure: the library
may never launch the other fatbins' kernels on that GPU.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from ..builds.contents import find_naming, read_manifest_in
from ..builds.manifest import declare_build, load_manifest
from ..errors import AccessError, KernelsError
from ..findings import libraries as ids
from ..findings.result import CheckResult, guard
from ..gpucode.archives import Library, Unread
from ..gpucode.images import ROCM_WARNING
from ..machine.installed import Installed, combine, read_variants
from ..product import BINDING, HAS_DISPATCHER, KERNELS, PROGRAM
from ..targets.advice import HOW_WORDS, describe_archs
from ..targets.wording import count, few_lines
from .driver import check_driver, check_neutral
from .environment import find_situation
from .gpus import check_any_gpu, check_gpu, describe_gpu
from .library_loading import LibraryLoading
from .library_verdict import LibraryVerdict, judge_library

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ..builds.manifest import Manifest
    from ..findings.result import Status
    from ..gpucode.images import FatbinReport
    from ..machine.libcuda import Gpu
    from .environment import Environment

_NAMED = 5  # maximum warnings in the details of a library; the first is in the summary

# Patterns that match an obstacle's sentence (`targets/compatibility.py`), each with the remedy.
_STEPS = (
    (r"needs (driver \d+ or (newer|older))", r"install NVIDIA \1"),
    (r"or newer, not|needs a driver newer", "install a newer NVIDIA driver"),
    (r"(\w+) is set", r"`unset \1`"),
    (r"is missing", "install the whole driver, its JIT compiler included"),
)


# A CUDA version in the name of a library or of its folder: `cuda124`, `cu12`, `cuda-13.0`.
_CUDA: Final = re.compile(r"cu(?:da)?[-_]?([0-9]{2,3}(?:[._][0-9]{1,2})?)(?![0-9])")


def examine_libraries(
    environment: Environment, libraries: Iterable[Library | Unread]
) -> Iterator[CheckResult]:
    """Check the machine, judge the libraries, and yield the results.

    There is a result for each check of the machine, each library that cannot be read or will not
    load, and each pair of GPU and library.
    """
    yield from _examine_machine(environment)
    reports, ours, plain, unread, unclear = [], [], 0, list[Unread](), list[CheckResult]()
    loading = LibraryLoading.make(environment)
    for library in libraries:
        if isinstance(library, Unread):
            unread.append(library)
            continue
        if loading is not None:
            loading.look(library)
        unclear += _doubt(library)
        own = read_own(library)
        if own is not None:
            ours.append(own)
        elif library.fatbin.report.entries:
            reports.append(library.fatbin.told())
        else:
            plain += 1
    yield from map(_lament, unread)
    yield from unclear
    if not (reports or ours or unread or unclear):
        summary = "no library inside"
        if plain:
            summary = (
                f"no GPU code for NVIDIA in {count(plain, 'library', 'libraries')}: kernels that "
                "are compiled when it runs (Triton, NVRTC) cannot be judged before"
            )
        yield CheckResult("warn", summary, entry=ids.NO_GPU_CODE, name="library")
    if loading is not None:
        yield from (replace(result, name="loading") for result in loading.results())
    for gpu in environment.cuda.gpus:
        results = [_check_own(environment, gpu, own) for own in ours]
        yield from results
        yield from check_libraries(environment, gpu, reports, served=any(results))


def _examine_machine(environment: Environment) -> Iterator[CheckResult]:
    yield from guard("driver", partial(check_driver, environment))
    yield from guard("variables", partial(check_neutral, environment))
    if not environment.cuda.gpus:
        yield from guard("gpu", partial(check_any_gpu, environment))


def read_own(library: Library) -> Installed | None:
    """Return the build that a library is part of, from its kernels' names and its manifest.

    Return None for a library of another package: its kernels' names do not tell which of them are
    variants of one kernel.
    """
    if not (library.fatbin.report.entries or _is_kernels(library.name)):
        return None
    manifest, problem = None, ""
    try:
        manifest = _read_manifest(library)
    except KernelsError as error:
        problem = error.message
    if not (_is_kernels(library.name) or manifest):
        return None
    try:
        toolkit = manifest.toolkit.cuda if manifest else None
        variants = read_variants(library.fatbin, toolkit, manifest)
    except AccessError as error:  # this Python cannot unpack the images: only headers are known
        if manifest is None:
            raise
        return _declare(library, manifest, error.message)
    if not variants:
        return None
    return combine(manifest, variants, library=library.name, manifest_problem=problem)


def _declare(library: Library, manifest: Manifest, reason: str) -> Installed:
    """Return the kernels that a build declares for the targets in the library's headers."""
    present = {entry.arch for entry in library.fatbin.report.entries}
    declared = declare_build(manifest).variants
    embedded = tuple(one for one in declared if one.arch in present)
    found = combine(manifest, embedded, library=library.name)
    return replace(found, library_problem=f"only its headers and _build.json: {reason}")


def _read_manifest(library: Library) -> Manifest | None:
    """Read the manifest next to a library, in a wheel or a folder.

    Returns:
        The manifest, reduced to the kernels of this library; None if it is for other libraries.

    Raises:
        KernelsError: There is no manifest, or it cannot be read.
    """
    if library.package:
        naming = find_naming(library.package.names)
        if naming is None or PurePosixPath(library.name).parent.name != naming.name:
            return None
        manifest = read_manifest_in(library.package)
    else:
        manifest = load_manifest(Path(library.name).parent)
    file = PurePosixPath(library.name).name
    if file not in manifest.libraries:
        return None
    held = tuple(one for one in manifest.kernels if one.is_plain == (file == BINDING))
    return replace(manifest, kernels=held)


def _check_own(environment: Environment, gpu: Gpu, own: Installed) -> CheckResult:
    """Judge a build of ours kernel by kernel, as if it were installed."""
    result = check_gpu(replace(environment, installed=own), gpu)
    name = own.build.name if own.build and not own.manifest_problem else own.library
    summary = result.summary if name in result.summary else f"{name} on {result.summary}"
    limits = {"by": own.library_problem, "without its manifest:": own.manifest_problem}
    unread = tuple(f"judged {how} {problem}" for how, problem in limits.items() if problem)
    details = (*result.details, *unread)
    return replace(result, name=f"gpu {gpu.index}", gpu=gpu.index, summary=summary, details=details)


def _lament(library: Unread) -> CheckResult:
    """Report an unreadable library: a failure for our kernel library, a warning for any other."""
    status: Status = "fail" if _is_kernels(library.name) else "warn"
    summary = f"{library.name} cannot be read: {library.reason}"
    return CheckResult(status, summary, entry=ids.LIBRARY_UNREAD, name="library")


def _doubt(library: Library) -> Iterator[CheckResult]:
    """Report GPU code of unknown format: a failure if the library has no other code.

    Code that is skipped on purpose, because it is for other GPUs, does not count.
    """
    report = library.fatbin.report
    unclear = [text for text in report.warnings if text != ROCM_WARNING]
    if unclear:
        summary = f"{library.name}: not all of its GPU code is understood: {unclear[0]}"
        status: Status = "warn" if report.entries else "fail"
        details = few_lines(unclear[1:], _NAMED)
        yield CheckResult(
            status, summary, details, entry=ids.LIBRARY_NOT_UNDERSTOOD, name="library"
        )


def _is_kernels(name: str) -> bool:
    return HAS_DISPATCHER and PurePosixPath(name).name == KERNELS


def check_libraries(
    environment: Environment, gpu: Gpu, reports: Sequence[FatbinReport], *, served: bool = False
) -> Iterator[CheckResult]:
    """Report the code that one GPU loads from each library.

    A library without code for the GPU is a failure only if no library has such code.
    """
    situation = find_situation(environment, gpu)
    verdicts = [judge_library(report, situation) for report in reports]
    served = served or any(verdicts)
    instead = {
        family: report.path
        for report, verdict in zip(reports, verdicts, strict=True)
        if verdict and not verdict.obstacle and (family := _name_family(report.path))
    }
    for report, verdict in zip(reports, verdicts, strict=True):
        other = "" if _is_torchs(report.path, environment) else _name_family(report.path)
        place = f"{report.path} on {describe_gpu(gpu)}"
        result = _describe(place, verdict, served=served, instead=instead.get(other, ""))
        data = {"library": report.path, **verdict.to_json()}
        yield replace(result, name=f"gpu {gpu.index}", gpu=gpu.index, data=data)


def _name_family(path: str) -> str:
    """Return a path with `cuda*` for each CUDA version in it; empty if it names no version."""
    name, found = _CUDA.subn("cuda*", path)
    return name if found else ""


def _is_torchs(path: str, environment: Environment) -> bool:
    """Tell if a path names torch's CUDA version: torch loads the library for that version."""
    toolkit = environment.torch.cuda.replace(".", "")
    if environment.what_if or not toolkit:
        return False
    return any(re.sub("[._]", "", found[1]) == toolkit for found in _CUDA.finditer(path))


def _describe(
    place: str, verdict: LibraryVerdict, *, served: bool, instead: str = ""
) -> CheckResult:
    """Report how a GPU runs the code of a library, or whether missing code matters."""
    if not verdict:
        return _refuse(place, verdict, served=served, instead=instead)
    ways = ", ".join(f"{HOW_WORDS[how]} ({target})" for how, target in verdict.counts)
    if verdict.unfit:
        fatbins = count(len(verdict.containers), "fatbin")
        summary = f"{place}: {ways}; nothing in {len(verdict.unfit)} of {fatbins}"
        details = (
            verdict.obstacle or "normal if the library does not call those kernels on this GPU",
        )
        fix = f"`{PROGRAM} inspect --level coverage` says which kernels these are"
        return CheckResult("warn", summary, details, fix, ids.LIBRARY_PARTLY)
    number = len(verdict.containers)
    where = f"all of {number} fatbins" if number > 1 else "its one fatbin"
    summary = f"{place}: {ways} in {where}"
    if verdict.how == "unverified":
        return CheckResult("warn", summary, entry=ids.LIBRARY_UNVERIFIED)
    return CheckResult("ok", summary)


def _refuse(place: str, verdict: LibraryVerdict, *, served: bool, instead: str) -> CheckResult:
    device = verdict.situation.device
    if verdict.obstacle:
        steps = ((re.search(words, verdict.obstacle), step) for words, step in _STEPS)
        fix = next((found.expand(step) for found, step in steps if found), "")
        sentence = f"{place}: {verdict.obstacle}"
        if instead:
            detail = f"normal if there is one library for each CUDA: {instead} serves this GPU"
            return CheckResult("warn", sentence, (detail,), fix, ids.LIBRARY_REFUSED)
        return CheckResult("fail", sentence, fix=fix, entry=ids.LIBRARY_REFUSED)
    sentence = f"{place}: no code that it can load, built for {describe_archs(verdict.archs)}"
    if served:
        detail = "normal if the library is not used on this GPU: others have code for it"
        return CheckResult("warn", sentence, (detail,), entry=ids.LIBRARY_NO_MATCHING_CODE)
    fix = f"install a build for compute capability {device}"
    return CheckResult("fail", sentence, fix=fix, entry=ids.LIBRARY_NO_MATCHING_CODE)
