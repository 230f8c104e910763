"""The report's table of GPUs, with the values of CUDA and nvidia-smi."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..targets.wording import format_memory
from .markup import Markup, element, join, make_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    Json = dict[str, Any]

_KIB: Final = 1024
_HEADS: Final = (
    *("GPU", "nvidia-smi", "name", "compute capability", "memory", "SMs"),
    *("shared memory of a block", "PCI", "id"),
)


def make_gpu_table(left: Json) -> Markup:
    """Take the GPUs out of the facts; omit columns that no GPU has."""
    cuda, nvml = left.get("cuda") or {}, (left.get("host") or {}).get("nvml") or {}
    shown, physical = cuda.pop("gpus", []), nvml.pop("gpus", [])
    places = {_place(one): one for one in physical if one["pci"]}
    rows = [_describe(gpu, places.get(_place(gpu), {})) for gpu in shown]
    known = {_place(gpu) for gpu in shown}
    rows += [_describe({}, one) for one in physical if _place(one) not in known]
    reason = "" if nvml.pop("status", "ok") == "ok" else nvml.pop("reason", None)
    note = element("p", f"nvidia-smi's list: {reason}", _class="legend") if reason else Markup()
    if not rows:
        return Markup()
    used = [place for place, _ in enumerate(_HEADS) if any(row[place] for row in rows)]
    cells = [(row[0], [row[place] for place in used if place]) for row in rows]
    table = make_table("GPUs", [_HEADS[place] for place in used], cells)
    return join(element("h3", "GPUs"), table, note)


def _place(gpu: Mapping[str, Any]) -> str:
    """Return the PCI address in their common form: NVML's domain has more digits than CUDA's."""
    return str(gpu["pci"] or "").lower().lstrip("0")


def _describe(gpu: Mapping[str, Any], physical: Mapping[str, Any]) -> Sequence[str]:
    """Write a GPU's cells; one that CUDA does not show has no CUDA number."""
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
