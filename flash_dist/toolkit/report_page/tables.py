"""The report's table of GPUs and kernels, or of GPUs and libraries, from the checks' data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from ..targets.axes import AXES, name_sizes
from ..targets.wording import list_ranges
from .markup import Markup, element, join, make_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..targets.axes import KernelKey

    Json = Mapping[str, Any]

# For each way in which a GPU gets code: a class of the style sheet, a label, its meaning.
HOWS: Final[Mapping[str, tuple[str, str, str]]] = {
    "native": ("ok", "native", "machine code for this GPU"),
    "family": ("ok", "family", "machine code for its family"),
    "same-major": ("ok", "same major", "machine code for an older minor"),
    "jit": ("jit", "JIT", "the driver compiles PTX at the first start"),
    "unverified": ("warn", "unverified", "NVIDIA does not guarantee that it runs"),
    "none": ("fail", "none", "no code that this GPU can load"),
    "no": ("fail", "none", "no code that this GPU can load"),
    "not-on-this-hardware": ("skip", "not on this GPU", "the GPU lacks instructions or memory"),
}

Cells = tuple[Markup, ...]


def make_tables(checks: Sequence[Json], gpus: Sequence[Json]) -> Markup:
    """Return the tables with the data of these checks; none if no GPU was judged."""
    judged = [check for check in checks if check["gpu"] is not None]
    kernels = {check["gpu"]: check for check in judged if check["data"].get("kernels")}
    libraries = [check for check in judged if check["data"].get("library")]
    tables = []
    if kernels:
        tables += [element("h2", "GPUs and kernels"), _kernel_table(kernels, gpus)]
    if libraries:
        tables += [element("h2", "GPUs and libraries"), _library_table(libraries, gpus)]
    return join(*tables)


def _kernel_table(checks: Mapping[int, Json], gpus: Sequence[Json]) -> Markup:
    groups: dict[KernelKey, dict[int, list[Json]]] = {}
    for gpu, check in checks.items():
        for kernel in check["data"]["kernels"]:
            by_gpu = groups.setdefault(AXES.read_key(kernel)._replace(sizes=()), {})
            by_gpu.setdefault(gpu, []).append(kernel)
    rows = {
        key: {gpu: _kernel_cell(kernels) for gpu, kernels in by_gpu.items()}
        for key, by_gpu in groups.items()
    }
    columns = _merge_columns(rows, list(checks), gpus)
    merged: dict[tuple[str, Cells], list[str]] = {}
    for key, row in sorted(rows.items(), key=lambda item: AXES.rank(item[0])):
        cells = tuple(row.get(column[0], Markup()) for column in columns)
        merged.setdefault((key.role, cells), []).append(" ".join(key.words))
    alike: dict[tuple[str, Cells], list[str]] = {}
    for (role, cells), dtypes in merged.items():
        alike.setdefault((" ".join(dtypes), cells), []).append(role)
    body = [
        (join(", ".join(roles), element("small", dtypes)), cells)
        for (dtypes, cells), roles in alike.items()
    ]
    hows = {kernel["how"] for c in checks.values() for kernel in c["data"]["kernels"]}
    heads = ("kernel", *(_head(column, gpus) for column in columns))
    table = make_table("GPUs and kernels", heads, body, style="roles")
    return join(table, _legend(hows), _reasons(columns, checks))


def _reasons(columns: Iterable[Sequence[int]], checks: Mapping[int, Json]) -> Markup:
    """Explain below the table why a GPU has no code."""
    lines = [
        element("div", f"{_number(column)}: {reason}")
        for column in columns
        for reason in [checks[column[0]]["data"]["reason"]]
        if reason
    ]
    return element("div", *lines, _class="legend") if lines else Markup()


def _kernel_cell(kernels: Iterable[Json]) -> Markup:
    """Return the cell that says how a GPU gets a role's code: one line for each way and target."""
    groups: dict[tuple[str, str], list[str]] = {}
    for kernel in kernels:
        size = name_sizes(AXES.read_key(kernel).sizes)
        groups.setdefault((kernel["how"], kernel["target"] or ""), []).append(size)
    return _join_lines(
        join(
            element("span", _chip(how), f" {target}", _class="whole"),
            element("small", f"{AXES.sizes[0]} {', '.join(sizes)}") if len(groups) > 1 else "",
        )
        for (how, target), sizes in groups.items()
    )


def _library_table(checks: Iterable[Json], gpus: Sequence[Json]) -> Markup:
    rows: dict[tuple[str, str], dict[int, Markup]] = {}
    hows: set[str] = set()
    for check in checks:
        data = check["data"]
        rows.setdefault((data["library"], ""), {})[check["gpu"]] = _library_cell(data)
        hows |= {way["how"] for way in data["ways"]} or {"no"}
    shown = sorted({gpu for row in rows.values() for gpu in row})
    columns = _merge_columns(rows, shown, gpus)
    body = [
        (library, [row.get(column[0], Markup()) for column in columns])
        for (library, _), row in rows.items()
    ]
    heads = ("library", *(_head(column, gpus) for column in columns))
    table = make_table("GPUs and libraries", heads, body, style="library")
    return join(table, _legend(hows))


def _library_cell(data: Json) -> Markup:
    lines = [
        element("span", _chip(way["how"]), f" {way['target']}", _class="whole")
        for way in data["ways"]
    ]
    if not lines:
        reason = data["obstacle"] or f"built for {', '.join(data['archs'])}"
        return join(_chip("no"), element("small", reason))
    if data["unfit"]:
        unfit = f"nothing in {data['unfit']} of {data['containers']} fatbins"
        lines.append(element("small", unfit))
    return _join_lines(lines)


def _merge_columns(
    rows: Mapping[Any, Mapping[int, Markup]], shown: Iterable[int], gpus: Sequence[Json]
) -> list[list[int]]:
    """Return the GPUs of each column: GPUs of one model with the same results share a column."""
    merged: dict[tuple[str, str, Cells], list[int]] = {}
    for gpu in shown:
        cells = tuple(row.get(gpu, Markup()) for row in rows.values())
        merged.setdefault((*_name(gpu, gpus), cells), []).append(gpu)
    return list(merged.values())


def _name(gpu: int, gpus: Sequence[Json]) -> tuple[str, str]:
    found = next((one for one in gpus if one["index"] == gpu), {})
    return str(found.get("name", "")), str(found.get("compute_capability", ""))


def _head(column: Sequence[int], gpus: Sequence[Json]) -> Markup:
    name, capability = _name(column[0], gpus)
    described = ", ".join(part for part in (name, capability) if part)
    return join(element("span", _number(column), _class="whole"), element("small", described))


def _number(column: Sequence[int]) -> str:
    return f"GPU {column[0]}" if len(column) == 1 else f"GPUs {list_ranges(column)}"


def _chip(how: str) -> Markup:
    style, word, _ = HOWS.get(how, ("skip", how, ""))
    return element("span", word, _class=f"chip {style}")


def _legend(hows: Iterable[str]) -> Markup:
    used = set(hows)
    entries = dict.fromkeys(entry for how, entry in HOWS.items() if how in used)
    return element(
        "p",
        *(
            element("span", element("span", word, _class=f"chip {style}"), meaning, _class="entry")
            for style, word, meaning in entries
        ),
        _class="legend",
    )


def _join_lines(lines: Iterable[Markup]) -> Markup:
    return Markup("<br>".join(lines))
