"""Writes the report's facts about the machine: groups of names and values, with their units."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, Final

from ..product import NAME
from ..targets.wording import count, format_memory
from .markup import Markup, element, join, make_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    Json = dict[str, Any]
    Fact = tuple[str, str]

_LOADS: Final = {
    "ok": "yes",
    "failed": "no",
    "crashed": "no: the process that tried ended",
    "unknown": "not known",
    "not-tried": "not tried",
    "skipped": "not asked",
}
_LIBCUDA: Final = {"compat": "of cuda-compat", "wsl": "of Windows' driver"}
_CACHE: Final = {
    "writable": "writable",
    "absent": "not there yet",
    "read-only": "may not be written",
    "homeless": "none: neither HOME nor CUDA_CACHE_PATH is set",
}
_KIB: Final = 1024
_HEADS: Final = (
    *("GPU", "nvidia-smi", "name", "compute capability", "memory", "SMs"),
    *("shared memory of a block", "PCI", "id"),
)


def make_facts(environment: Mapping[str, Any]) -> Markup:
    """Return the facts in groups, then the GPUs; facts that fit no group are under "Also"."""
    left = deepcopy(dict(environment))
    what_if = left.pop("what_if", False)
    machine = "Asked on" if what_if else "Machine"
    if what_if:
        _leave_out_unasked(left)
    table = make_gpu_table(left)
    groups = (
        _group(machine, _describe_machine(left)),
        _group("Python and torch", _describe_torch(left)),
        _group(NAME, _describe_build(left)),
        _group("Driver", _describe_driver(left)),
        _group("Variables", _take(left, "variables").items(), empty="set to nothing"),
        _group("Also", _flatten(left, "")),
    )
    return join(element("div", *groups, _class="groups"), table)


def _leave_out_unasked(left: Json) -> None:
    """Remove facts that were not examined because the GPUs are imaginary."""
    installed, files, loading = (left.get(name) or {} for name in ("installed", "files", "loading"))
    if not installed.get("build"):
        left.pop("installed", None)
    if not files.get("folder"):
        left.pop("files", None)
    if loading.get("status") == "not-tried":
        left.pop("loading", None)


def _group(title: str, facts: Iterable[Fact], *, empty: str = "") -> Markup:
    rows = [
        element("div", element("dt", name), element("dd", value or empty))
        for name, value in facts
        if value or empty
    ]
    if not rows:
        return Markup()
    return element("div", element("h3", title), element("dl", *rows, _class="named"))


def _take(left: Json, name: str) -> Json:
    """Remove and return a part; return an empty part if it is absent or null."""
    return left.pop(name, None) or {}


def _describe_machine(left: Json) -> Iterator[Fact]:
    host = left.get("host") or {}
    yield "Operating system", left.pop("system", "")
    yield "CPU", left.pop("machine", "")
    yield "C library", left.pop("libc", "")
    yield "Container", host.pop("container", None) or ""
    wsl, dxg = host.pop("wsl", False), host.pop("dxg", False)
    yield "WSL", ("with /dev/dxg" if dxg else "without /dev/dxg") if wsl else ""


def _describe_torch(left: Json) -> Iterator[Fact]:
    torch, code = _take(left, "torch"), _take(left, "torch_code")
    yield "Python", left.pop("python", "")
    status = torch.pop("status", "")
    version, cuda = torch.pop("version", None), torch.pop("cuda", None)
    if version:
        version = f"{version} ({f'CUDA {cuda}' if cuda else 'a build without CUDA'})"
    elif status == "absent":
        version = "not installed"
    yield "torch", _because(version or status, torch.pop("reason", None))
    for library in code.pop("libraries", []):
        targets = ", ".join(library["targets"])
        yield library["path"].rpartition("/")[2], f"{targets}; {count(library['images'], 'image')}"
    yield "torch's own list", " ".join(code.pop("arch_list", []))
    yield "GPU code of torch", code.pop("reason", None) or ""


def _describe_build(left: Json) -> Iterator[Fact]:
    asked = "installed" in left
    installed, files = _take(left, "installed"), _take(left, "files")
    installed.pop("archsets", None)  # sets to choose from: not about this build
    yield "Build", installed.pop("build", None) or "none" * asked
    yield "Code inside", ", ".join(installed.pop("targets", []))
    toolkit = installed.pop("toolkit", None)
    yield "Compiled with", f"CUDA {toolkit}" if toolkit else ""
    oldest, newest = installed.pop("torch_min", None), installed.pop("torch_tested_max", None)
    yield "For torch", f"{oldest} or newer, tested to {newest}" if oldest and newest else ""
    yield "Manifest", installed.pop("manifest_problem", None) or ""
    yield "Library", installed.pop("library_problem", None) or ""
    yield "Manifest and library", "; ".join(installed.pop("differences", []))
    yield "Files", _describe_files(files)
    yield "Folder", files.pop("folder", "")
    for name, key in (("Missing", "missing"), ("Changed", "changed"), ("Left over", "leftovers")):
        yield name, ", ".join(files.pop(key, []))
    yield "Other copies", ", ".join(files.pop("copies", []))
    yield "Loads", _describe_loading(_take(left, "loading"))
    yield "Loading was predicted", _describe_loading(_take(left, "predicted_loading"))


def _describe_files(files: Json) -> str:
    status, number = str(files.pop("status", "")), count(files.pop("files", 0), "file")
    words = {"recorded": f"{number} that pip recorded", "unrecorded": "without a record of pip"}
    return words.get(status, status)


def _describe_loading(loading: Json) -> str:
    if not loading:
        return ""
    said = _LOADS.get(loading["status"]) or str(loading["status"])
    if loading.get("source") == "predicted":
        said += " (predicted)"
    part = f"{loading['stage']}: " if loading["stage"] else ""
    return _because(said, f"{part}{loading['reason']}" if loading["reason"] else None)


def _describe_driver(left: Json) -> Iterator[Fact]:
    cuda, host = left.get("cuda") or {}, left.get("host") or {}
    status, reason = cuda.pop("status", ""), cuda.pop("reason", None)
    release, speaks = cuda.pop("driver_release", None), cuda.pop("driver_cuda", None)
    said = {"absent": "none", "broken": "does not answer"}.get(status, "")
    if status == "ok":
        said = " ".join(filter(None, [release, speaks and f"(CUDA {speaks})"]))
    yield "Driver", _because(said, reason)
    kind = _LIBCUDA.get(host.pop("libcuda_kind", None) or "", "")
    host.pop("libcuda_release", None)  # not shown: libcuda's file name contains it
    yield "libcuda", " ".join(filter(None, [host.pop("libcuda", None), kind]))
    stray = host.pop("stray_libcuda", None)
    yield "libcuda elsewhere", f"{stray}, which the loader does not search" if stray else ""
    yield "JIT compiler", host.pop("jit_compiler", None) or ""
    release, gpus = host.pop("module_release", None), host.pop("module_gpus", 0)
    yield "Kernel module", f"{release}, which drives {count(gpus, 'GPU')}" if release else ""
    files = host.pop("device_files", [])
    for name, allowed in (("Device files", True), ("Device files, closed to this user", False)):
        yield name, ", ".join(one["path"] for one in files if one["allowed"] is allowed)
    yield "JIT cache", _describe_cache(_take(host, "jit_cache"))


def _describe_cache(cache: Json) -> str:
    if not cache:
        return ""
    free, limit = cache["free_bytes"], cache["limit_bytes"]
    parts = [
        cache["folder"],
        _CACHE.get(cache["status"], cache["status"]),
        f"{format_memory(free)} free" if free is not None else "",
        f"holds at most {format_memory(limit)}" if limit is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _because(said: str, reason: str | None) -> str:
    return f"{said}: {reason}" if said and reason else said or reason or ""


def _flatten(value: Any, name: str) -> Iterator[Fact]:  # noqa: ANN401 - plain data
    """Yield a fact for each value in plain data, named after the value's keys; leave out None."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _flatten(one, f"{name} {key.replace('_', ' ')}".strip())
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        for place, one in enumerate(value):
            yield from _flatten(one, f"{name} {place}")
    elif isinstance(value, list):
        yield name, ", ".join(map(str, value))
    elif isinstance(value, bool):
        yield name, "yes" if value else "no"
    elif value is not None:
        yield name, str(value)


def make_gpu_table(left: Json) -> Markup:
    """Remove the GPUs from the facts, and return them as a table without empty columns."""
    cuda, nvml = left.get("cuda") or {}, (left.get("host") or {}).get("nvml") or {}
    shown, physical = cuda.pop("gpus", []), nvml.pop("gpus", [])
    places = {_place(one): one for one in physical if one["pci"]}
    rows = [_describe_gpu(gpu, places.get(_place(gpu), {})) for gpu in shown]
    known = {_place(gpu) for gpu in shown}
    rows += [_describe_gpu({}, one) for one in physical if _place(one) not in known]
    reason = "" if nvml.pop("status", "ok") == "ok" else nvml.pop("reason", None)
    note = element("p", f"nvidia-smi's list: {reason}", _class="legend") if reason else Markup()
    if not rows:
        return Markup()
    used = [place for place, _ in enumerate(_HEADS) if any(row[place] for row in rows)]
    cells = [(row[0], [row[place] for place in used if place]) for row in rows]
    table = make_table("GPUs", [_HEADS[place] for place in used], cells)
    return join(element("h3", "GPUs"), table, note)


def _place(gpu: Mapping[str, Any]) -> str:
    """Return the PCI address in the same form for NVML and CUDA, which write it differently."""
    return str(gpu["pci"] or "").lower().lstrip("0")


def _describe_gpu(gpu: Mapping[str, Any], physical: Mapping[str, Any]) -> Sequence[str]:
    """Return a GPU's cells; the first is `hidden` if CUDA does not show the GPU."""
    memory, smem = gpu.get("memory_bytes"), gpu.get("smem_optin")
    number = gpu.get("index")
    return (
        "hidden" if number is None else str(number),
        str(physical.get("index", "")),
        join(*_name(gpu, physical)),
        gpu.get("compute_capability") or physical.get("compute_capability") or "",
        _whole(format_memory(memory)) if memory else "",
        str(gpu.get("sm_count") or ""),
        f"{smem // _KIB} KB" if smem else "",
        _whole(gpu.get("pci") or physical.get("pci") or ""),
        _whole(gpu.get("uuid") or physical.get("uuid") or ""),
    )


def _whole(text: str) -> str:
    return element("span", text, _class="whole") if text else ""


def _name(gpu: Mapping[str, Any], physical: Mapping[str, Any]) -> Iterator[str]:
    name = gpu.get("name") or physical.get("name")
    yield element("span", name, _class="long") if name else ""
    if physical.get("mig"):
        instances = physical["mig_instances"]
        told = ", ".join(f"{one['name']} ({one['uuid']})" for one in instances)
        yield element("small", f"in MIG mode: {told or 'no instance'}")
