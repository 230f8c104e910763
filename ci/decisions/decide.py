"""Ask the planner and the masks what they decide, and write it down.

python -m ci.decisions.decide [--check]

The planner (csrc/host/plan.cpp) is compiled by g++ and asked through csrc/debug/plans.cpp; the
masks are planned by torch on the CPU. Neither needs a GPU or a CUDA toolkit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci.decisions.cases import Call, band_calls, mask_cases, masked_calls
from csrc.generate import CSRC, Table, render_roles
from flash_dist.masks.layout import BAND, ROWS, TILES
from flash_dist.toolkit.errors import FlashDistError
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.compile.decisions import (
    DECISIONS,
    REMEDY,
    digest,
    list_changes,
    read_decisions,
    write_decisions,
)
from flash_dist.toolkit.targets.wording import list_few

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ci.decisions.cases import MaskCase
    from flash_dist.masks.plan import MaskPlan
    from flash_dist.toolkit.make.compile.decisions import Decisions

SHOWN: Final = 16  # characters of a digest: these tell changes apart, they are no proof


class PlannerError(FlashDistError):
    """The planner cannot be asked."""


@cache
def load_table() -> Table:
    """Read csrc/kernels.toml."""
    return Table.load()


def compile_planner(folder: Path, csrc: Path = CSRC, *, warn: bool = True) -> Path:
    """Compile the planner with this machine's C++ compiler and return the program.

    Raises:
        PlannerError: There is no compiler, or it refuses the sources.
    """
    (folder / "roles.h").write_text(render_roles(load_table()), encoding="utf-8")
    program = folder / "plans"
    compiler = os.environ.get("CXX", "g++")
    sources = [str(csrc / "debug" / "plans.cpp"), str(csrc / "host" / "plan.cpp")]
    call = [compiler, "-std=c++17"]
    call += ["-Wall", "-Wextra", "-Werror"] if warn else ["-w"]
    call += ["-I", str(csrc), "-I", str(folder), *sources, "-o", str(program)]
    try:
        done = subprocess.run(call, check=False, capture_output=True, text=True)
    except FileNotFoundError as error:
        message = f"the C++ compiler `{compiler}` is not installed"
        raise PlannerError(message, hint="`apt-get install g++`, or name another in CXX") from error
    if done.returncode:
        message = f"the planner does not compile: {done.stderr}"
        raise PlannerError(message)
    return program


def ask_planner(program: Path, calls: Iterable[Call]) -> list[dict[str, Any]]:
    """Return the plan of each call.

    Raises:
        PlannerError: The program fails.
    """
    lines = "".join(f"{_line_of(call)}\n" for call in calls)
    done = subprocess.run([str(program)], check=False, input=lines, capture_output=True, text=True)
    if done.returncode:
        message = f"the planner fails: {done.stderr.strip() or done.returncode}"
        raise PlannerError(message)
    return [json.loads(line) for line in done.stdout.splitlines()]


@cache
def _compiled_sizes(role: str) -> tuple[tuple[int, int], ...]:
    rows = (row for family in load_table().families if family.role == role for row in family.rows)
    return tuple(sorted({(row.head_dim, row.head_dim_v) for row in rows}))


def _line_of(call: Call) -> str:
    """Write a call as csrc/debug/plans.cpp reads it."""
    gpu, slots = call.gpu, call.key_slots
    shape = (call.batch, call.seqlen_q, call.seqlen_k, call.num_heads_kv, call.group)
    dkdv = (gpu.sm_count, gpu.key_tile, gpu.blocks_per_sm)
    kernels = (*dkdv, gpu.dq_rows, gpu.dq_blocks_per_sm, gpu.cluster, int(gpu.fused))
    known = (-1,) if slots is None else (len(slots), *slots)
    role = "bwd_fused" if gpu.fused else "bwd_dkdv"
    sizes = [column for size in _compiled_sizes(role) for column in size]
    columns = (call.head_dim, call.head_dim_v)
    flags = (call.batch_invariant, call.normalizes, call.aligned, call.per_head)
    how = (call.budget, *map(int, flags))
    numbers = (*shape, call.total_q, *columns, *call.mask, *kernels, *how, *known)
    return " ".join(map(str, (*numbers, len(sizes) // 2, *sizes)))


def plan_masks() -> dict[MaskCase, MaskPlan]:
    """Return the plan of every mask of the table."""
    plans = {}
    for case in mask_cases():
        sizes = (case.batch, case.heads, case.seqlen_q, case.seqlen_k)
        plans[case] = case.make(*sizes).plan(*sizes)
    return plans


def decide(program: Path, plans: Mapping[MaskCase, MaskPlan]) -> Decisions:
    """Return all decisions: of the planner, of the masks, of the table of kernels."""
    calls = list(band_calls())
    for case, plan in plans.items():
        calls += masked_calls(case, plan.kind, tuple(plan.key_slots.tolist()))
    answers = ask_planner(program, calls)
    return {
        "kernels": describe_table(load_table()),
        "masks": {case.name: describe_mask(plan) for case, plan in plans.items()},
        "launches": {
            call.name: describe_launches(plan) for call, plan in zip(calls, answers, strict=True)
        },
    }


def describe_launches(plan: dict[str, Any]) -> str:
    """Say in words what a backward does, and everything in a digest."""
    if "fused" in plan:
        words = "fused"
    elif plan["steps"]:
        words = "spill" if plan["spill"] else "recompute"
    else:
        words = "not fused"
    return f"{words}, split {plan['group_split']}, chunks {len(plan['chunks'])}, {_short(plan)}"


def describe_mask(plan: MaskPlan) -> str:
    """Say the kind of a mask's plan and its tiles, and everything in a digest.

    The digest is of the arrays by name; where they lie in their buffer decides nothing.
    """
    told = {
        ".".join(names): [list(array.shape), hashlib.sha256(array.numpy().tobytes()).hexdigest()]
        for names, array in plan.arrays.present()
    }
    sizes = (plan.kind, plan.batches, plan.heads, plan.seqlen_q, plan.seqlen_k)
    kind = {BAND: "band", ROWS: "rows", TILES: "tiles"}[plan.kind]
    return f"{kind}, slots {int(plan.key_slots[-1])}, {_short([sizes, told])}"


def describe_table(table: Table) -> dict[str, str]:
    """Return what decides bits of the table of kernels, a line for each family."""
    told = {
        "dtypes": _short(table.dtypes),
        "plans": _short([table.smem_plans, sorted(map(str, table.every_plan))]),
    }
    for family in table.families:
        rows = [
            [row.head_dim, row.head_dim_v, row.plan, dict(row.constants)] for row in family.rows
        ]
        name = " ".join([family.name, *family.dtypes])
        targets = sorted(map(str, family.targets))
        told[name] = f"{family.role}, {len(rows)} rows, {_short([family.role, targets, rows])}"
    return told


def _short(data: object) -> str:
    return digest(data)[:SHOWN]


@command
def main(args: Sequence[str] | None = None) -> int:
    """Command line of `nox -s decisions`."""
    parser = argparse.ArgumentParser(prog="python -m ci.decisions.decide", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args(args).check
    with tempfile.TemporaryDirectory(prefix="flash_dist-") as folder:
        decisions = decide(compile_planner(Path(folder)), plan_masks())
        changes = list_changes(read_decisions() if DECISIONS.is_file() else {}, decisions)
    if not changes:
        print(f"{sum(map(len, decisions.values()))} decisions match `{DECISIONS.name}`")
        return 0
    if check:
        message = f"{len(changes)} decisions differ from `{DECISIONS.name}`: {list_few(changes, 5)}"
        raise FlashDistError(message, hint=REMEDY)
    write_decisions(DECISIONS, decisions)
    print(f"{len(changes)} decisions changed: {list_few(changes, 5)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
