"""What the host decides: the committed file, that wording is not in it, and that every rule is."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ci.decisions.cases import band_calls, mask_cases
from ci.decisions.decide import (
    compile_planner,
    decide,
    describe_table,
    load_table,
    main,
    plan_masks,
)
from csrc.generate import CSRC
from flash_dist.masks.layout import BY_ROWS
from flash_dist.masks.tiles import slots_of
from flash_dist.toolkit.errors import FlashDistError
from flash_dist.toolkit.make.compile.decisions import (
    DECISIONS,
    hash_decisions,
    list_changes,
    read_decisions,
    write_decisions,
)
from tests.unit.made.planner import planner, require_compiler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from ci.decisions.cases import MaskCase
    from csrc.generate import Family
    from flash_dist.masks.plan import MaskPlan
    from flash_dist.toolkit.make.compile.decisions import Decisions

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def plans() -> dict[MaskCase, MaskPlan]:
    return plan_masks()


@pytest.fixture(scope="session")
def decided(plans: dict[MaskCase, MaskPlan]) -> Decisions:
    return decide(planner(), plans)


def test_the_committed_file_is_what_the_planner_and_the_masks_decide(decided: Decisions) -> None:
    assert list_changes(read_decisions(), decided) == []
    assert hash_decisions() == hash_decisions(decided)


def test_every_case_has_a_name_of_its_own(decided: Decisions) -> None:
    for names in (
        [call.name for call in band_calls()],
        [case.name for case in mask_cases()],
    ):
        assert [name for name, count in Counter(names).items() if count > 1] == []
        assert names
    assert len(decided["launches"]) == len(list(band_calls())) + 2 * len(decided["masks"])


def test_the_cases_take_every_way_through_the_planner(decided: Decisions) -> None:
    launches = [text.split(", ") for text in decided["launches"].values()]
    assert {words[0] for words in launches} == {"spill", "recompute", "fused", "not fused"}
    assert len({words[1] for words in launches}) > 5  # splits
    assert len({words[2] for words in launches}) > 5  # chunks
    assert {text.split(",")[0] for text in decided["masks"].values()} == {"rows", "tiles"}


# --- Words --------------------------------------------------------------------------------------


def test_comments_and_layout_of_the_planner_decide_nothing(
    tmp_path: Path, decided: Decisions, plans: dict[MaskCase, MaskPlan]
) -> None:
    require_compiler()
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    for name in (
        "host/plan.cpp",
        "host/plan.h",
        "host/plan_grid.h",
        "host/cells.h",
        "host/splits.h",
        "core/ds_layout.h",
        "core/band.h",
    ):
        text = (csrc / name).read_text()
        bare = re.sub(r"(?m)(^|\s)//.*$", "", text).replace("wave_", "enough_")
        assert bare != text
        (csrc / name).write_text("// Reworded.\n" + bare)
    assert decide(compile_planner(tmp_path, csrc), plans) == decided


def test_the_order_of_the_file_is_no_matter() -> None:
    known = read_decisions()
    turned = {part: dict(reversed(list(known[part].items()))) for part in reversed(list(known))}
    assert hash_decisions(turned) == hash_decisions(known)


# --- Rules of the planner -----------------------------------------------------------------------

PLANTED = {
    "statistics' rows": ("host/plan_grid.h", "ROW_PADDING = 128", "ROW_PADDING = 64"),
    "waves of uneven blocks": ("host/splits.h", "UNEVEN_WAVES = 16", "UNEVEN_WAVES = 12"),
    "what is a full wave": ("host/plan_grid.h", "WAVE_PERCENT = 95", "WAVE_PERCENT = 85"),
    "what a block of keys costs": ("host/plan_grid.h", "DKDV_PRODUCTS = 4", "DKDV_PRODUCTS = 1"),
    "how many chunks are tried": ("host/plan.cpp", "MOST_CHUNKS = 4", "MOST_CHUNKS = 1"),
    "budget of partial sums": ("host/splits.h", "return budget_ / 2 /", "return budget_ / 4 /"),
    "keys at which a stripe ends": (
        "host/plan_grid.h",
        "step_(std::max(kernels.key_tile, DS_TILE))",
        "step_(2 * std::max(kernels.key_tile, DS_TILE))",
    ),
    "key tiles at a time in clusters": (
        "host/plan_grid.h",
        "kernels.blocks_per_sm / kernels.cluster",
        "kernels.blocks_per_sm",
    ),
    "units at a time of one kernel of all gradients": (
        "host/plan.cpp",
        "ceil_div(units_, std::min(units_, at_a_time))",
        "units_",
    ),
    "no smaller split": ("host/plan.cpp", "int split = wanted - 1;", "int split = 0;"),
    "no larger split": ("host/plan.cpp", "split = splits_.next_group_split(split)", "split = 0"),
    "batch invariance": (
        "host/plan.cpp",
        "if (!batch_invariant) {\n      // More",
        "if (true) {\n      // More",
    ),
    "stripes before units": (
        "host/plan.cpp",
        "(cut_by_units(plan, left) || cut_by_stripes_or_cells(plan, left))",
        "(cut_by_stripes_or_cells(plan, left) || cut_by_units(plan, left))",
    ),
    "units that divide": (
        "host/plan.cpp",
        "if (accum > left) return false;\n      if (units_ % units != 0) continue;",
        "if (accum > left) return false;",
    ),
    "stripes of equal dS": ("host/plan.cpp", "< total * i / count", "< total * (i + 1) / count"),
    "idle stripes": ("host/plan.cpp", "if (!fills(plan, units, shortest)) continue;", ""),
    "idle chunks": (
        "host/plan.cpp",
        "if (count > 1 && !fills(plan, units_ / count, key_steps_)) return false;",
        "",
    ),
    "chunks of uneven blocks": ("host/plan.cpp", "if (!even()) return best;", ""),
    "cells that are too short": (
        "host/cells.h",
        "LEAST_CELL_TILES = 32",
        "LEAST_CELL_TILES = 64",
    ),
    "waves of a cell": ("host/cells.h", "MOST_WAVES = 4", "MOST_WAVES = 1"),
    "what a block costs": ("host/cells.h", "BLOCK_OVERHEAD = 6", "BLOCK_OVERHEAD = 60"),
    "what sums of dK and dV cost": ("host/cells.h", "DKDV_COLUMNS = 64", "DKDV_COLUMNS = 2"),
    "what a sum of dQ costs": ("host/cells.h", "DQ_COLUMNS = 16", "DQ_COLUMNS = 1"),
    "cells where stripes are cheaper": (
        "host/plan.cpp",
        "(!are_stripes || planner.cost_of(cells) < planner.cost_of(plan))",
        "true",
    ),
    "stripes where cells are cheaper": (
        "host/plan.cpp",
        "(!are_stripes || planner.cost_of(cells) < planner.cost_of(plan))",
        "!are_stripes",
    ),
    "keys first": ("host/cells.h", "{true, false}", "{false}"),
    "queries first": ("host/cells.h", "{true, false}", "{true}"),
    "whole query heads in a cell": (
        "host/cells.h",
        "std::max<int64_t>(most / all, 1)",
        "std::max<int64_t>(1, 1)",
    ),
    "hidden cells": (
        "host/cells.h",
        "(j + 1) * cut.tiles)) continue;",
        "(j + 1) * cut.tiles)) {}",
    ),
    "blocks that follow each other": (
        "host/cells.h",
        "ceil_div(blocks, resident) * length",
        "length",
    ),
    "cells of what counts from the last query": (
        "host/cells.h",
        "if (shape_.aligned) return false;",
        "",
    ),
    "cells of packed documents": ("host/cells.h", " || shape_.total_q >= 0) return", ") return"),
    "masks without slots": ("host/plan_grid.h", "shape_.key_slots != nullptr", "false"),
    "order of the launches": (
        "host/plan.cpp",
        "plan.steps.push_back({dq, size, chunk});",
        "plan.steps.insert(plan.steps.end() - 1, {dq, size, chunk});",
    ),
    "size of delta": ("host/plan.cpp", "{shape_.columns_v, shape_.columns_v}", "size"),
    "size that holds a call": (
        "host/plan.cpp",
        "std::make_pair(s.head_dim + s.head_dim_v, s.head_dim_v)",
        "std::make_pair(s.head_dim + s.head_dim_v, s.head_dim)",
    ),
    "what may be stored": (
        "host/plan.cpp",
        "return has_dq_gemm && budget > 0",
        "return budget < 0",
    ),
    "how late blocks end where the longest begin": (
        "host/splits.h",
        "LATE_OF_FIRST = 8",
        "LATE_OF_FIRST = 1",
    ),
    "how late they end where the longest are last": (
        "host/splits.h",
        "LATE_OF_LAST = 2",
        "LATE_OF_LAST = 20",
    ),
    "what partial sums cost": ("host/splits.h", "SUM_STEPS = 3", "SUM_STEPS = 30"),
    "what their launch costs": ("host/splits.h", "LAUNCH_STEPS = 1", "LAUNCH_STEPS = 40"),
    "what splits must save": ("host/splits.h", "WORTH = 50", "WORTH = 4"),
    "waves with the first keys first": (
        "host/splits.h",
        "FIRST_KEYS_WAVES = 8",
        "FIRST_KEYS_WAVES = 9",
    ),
    "keys with the first keys first": ("host/splits.h", "FIRST_KEYS = 8192", "FIRST_KEYS = 8064"),
    "rounds that wait": ("host/splits.h", "WAITING_ROUNDS = 2", "WAITING_ROUNDS = 3"),
    "columns that wait": ("host/splits.h", "shape_.head_dim <= 64", "shape_.head_dim <= 32"),
    "what grows": ("host/splits.h", "4 * first > 5 * second", "4 * first > 20 * second"),
    "masks of each head": ("host/splits.h", " || shape_.per_head) return", ") return"),
    "stripes of queries of lists": (
        "host/splits.h",
        "if (packed() || shape_.mask.kind == MaskKind::TILES) return 1;",
        "if (packed()) return 1;",
    ),
    "stripes of packed queries": (
        "host/splits.h",
        "if (packed() || shape_.mask.kind == MaskKind::TILES) return 1;",
        "if (shape_.mask.kind == MaskKind::TILES) return 1;",
    ),
    "what stripes of queries must save": (
        "host/splits.h",
        "LEAST_SAVED = 4",
        "LEAST_SAVED = 3",
    ),
    "room for stripes of queries": ("host/splits.h", "std::min({room, tiles,", "std::min({room,"),
    "wide windows": ("core/band.h", "width >= most ?", "width > (most << 30) ?"),
    "what is even": ("core/band.h", "mask.right >= UNBOUNDED &&\n         !packed", "true"),
    "slots of a triangle": ("core/ds_layout.h", "width_ = TRIANGLE", "width_ = query_tiles_"),
    "slots of a window": ("core/ds_layout.h", "2 * DS_TILE - 2", "3 * DS_TILE"),
}


@pytest.mark.parametrize("fault", PLANTED.values(), ids=PLANTED)
def test_a_changed_rule_of_the_planner_changes_the_hash(
    tmp_path: Path,
    decided: Decisions,
    plans: dict[MaskCase, MaskPlan],
    fault: tuple[str, str, str],
) -> None:
    require_compiler()
    name, old, new = fault
    csrc = tmp_path / "csrc"
    shutil.copytree(CSRC, csrc)
    text = (csrc / name).read_text()
    assert text.count(old) == 1
    (csrc / name).write_text(text.replace(old, new))
    changed = list_changes(decided, decide(compile_planner(tmp_path, csrc, warn=False), plans))
    assert changed
    assert all(one.startswith("launches: ") for one in changed)


# --- Rules of the masks -------------------------------------------------------------------------


def _turn_slots(*args: Any) -> Any:  # noqa: ANN401
    key_slots, slots = slots_of(*args)
    return key_slots, slots.flip(0)


def _set(target: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(f"flash_dist.masks.{target}", value)


MASK_FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows or tiles": _set("planner.LEAST_USE", 0.99),
    "order of slots": _set("planner.slots_of", _turn_slots),
    "code of a full tile": _set("tiles.FULL", BY_ROWS),
    "keys that exist": _set("planner._key_bounds", lambda *_: None),
    "intervals found in booleans": _set("tiles._note_intervals", lambda *_: None),
    "range of a key tile": _set(
        "planner.key_ranges",
        lambda ranges, seqlen_k: torch.zeros(
            *ranges.shape[:2], -(-seqlen_k // 64), 2, dtype=torch.int64
        ),
    ),
}


@pytest.mark.parametrize("plant", MASK_FAULTS.values(), ids=MASK_FAULTS)
def test_a_changed_rule_of_the_masks_changes_the_hash(
    monkeypatch: pytest.MonkeyPatch,
    decided: Decisions,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    plant(monkeypatch)
    changed = list_changes(decided, decide(planner(), plan_masks()))
    assert any(one.startswith("masks: ") for one in changed)


# --- The table of kernels -----------------------------------------------------------------------

TABLE_FAULTS: dict[str, Callable[[Family], Family]] = {
    "a tile": lambda family: replace(
        family,
        rows=(replace(family.rows[0], constants=(("warps", 2),)), *family.rows[1:]),
    ),
    "a row less": lambda family: replace(family, rows=family.rows[1:]),
    "a dtype less": lambda family: replace(family, dtypes=family.dtypes[:1]),
    "another role": lambda family: replace(family, role="bwd_delta"),
    "fewer targets": lambda family: replace(family, targets=load_table().every_plan),
}


@pytest.mark.parametrize("change", TABLE_FAULTS.values(), ids=TABLE_FAULTS)
def test_a_changed_row_changes_the_hash_and_a_moved_header_does_not(
    change: Callable[[Family], Family],
) -> None:
    table = load_table()
    first, *others = table.families
    moved = replace(table, families=(replace(first, header="elsewhere.h"), *others))
    assert describe_table(moved) == describe_table(table) == read_decisions()["kernels"]
    assert describe_table(replace(table, families=(change(first), *others))) != describe_table(
        table
    )


# --- The command --------------------------------------------------------------------------------


def test_the_command_checks_writes_and_names_what_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_compiler()
    path = tmp_path / DECISIONS.name
    stale = read_decisions()
    name = next(iter(stale["masks"]))
    stale["masks"][name] = "other"
    write_decisions(path, stale)
    monkeypatch.setattr("ci.decisions.decide.DECISIONS", path)
    monkeypatch.setattr("ci.decisions.decide.read_decisions", lambda: read_decisions(path))
    assert main(["--check"]) == 1
    assert f"1 decisions differ from `decisions.json`: masks: {name}" in (capsys.readouterr().err)
    assert main([]) == 0
    assert path.read_bytes() == DECISIONS.read_bytes()
    assert main(["--check"]) == 0


def test_an_unreadable_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text("{")
    for name in ("d.json", "absent.json"):
        with pytest.raises(FlashDistError, match="cannot be read"):
            read_decisions(tmp_path / name)
