"""The digest of a mask's plan contains all inputs of its arrays, and no memory addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.masks.inputs import Shape
from flash_dist.masks.plan import pack_plan
from flash_dist.masks.tiles import slots_of
from flash_dist.proof.cases import Kernels, make_cases
from flash_dist.proof.inputs import Inputs

if TYPE_CHECKING:
    from collections.abc import Callable

CASES = [case for case in make_cases([Kernels("bf16", 64, 64)], 0) if case.mask and not case.scores]


def digest_all() -> dict[str, str]:
    """Return the selftest cases' descriptions of their masks."""
    found = {}
    for case in CASES:
        inputs = Inputs.make(case, torch.device("cpu"))
        found[case.mask] = inputs.describe_mask(case).get("mask", "")
    return found


def test_masks_differ_and_a_band_is_in_the_plan_of_the_library() -> None:
    digests = digest_all()
    assert digests.pop("window") == ""
    assert all(digests.values())
    assert len(set(digests.values())) == len(digests)


def test_where_arrays_lie_is_no_matter() -> None:
    case = next(case for case in CASES if case.mask == "dense")
    mask = Inputs.make(case, torch.device("cpu")).mask
    assert mask is not None
    plan = mask.plan(case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
    shape = Shape(plan.batches, plan.heads, plan.seqlen_q, plan.seqlen_k)
    assert pack_plan(plan.kind, shape, plan.arrays).digest() == plan.digest()
    other = plan.arrays | {"key_slots": plan.key_slots + 1}
    assert pack_plan(plan.kind, shape, other).digest() != plan.digest()


def _turn_slots(*args: Any) -> Any:  # noqa: ANN401
    key_slots, slots = slots_of(*args)
    return key_slots, slots.flip(0)


def _set(target: str, value: object) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: monkeypatch.setattr(f"flash_dist.masks.{target}", value)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "order of slots": _set("planner.slots_of", _turn_slots),
    "keys that exist": _set("planner._key_bounds", lambda *_: {}),
    "range of a key tile": _set(
        "planner.key_ranges",
        lambda ranges, seqlen_k: torch.zeros(
            *ranges.shape[:2], -(-seqlen_k // 64), 2, dtype=torch.int64
        ),
    ),
}


@pytest.mark.parametrize("plant", FAULTS.values(), ids=FAULTS)
def test_a_changed_rule_changes_the_digest_of_some_masks(
    monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = digest_all()
    plant(monkeypatch)
    after = digest_all()
    assert before != after
    assert before["window"] == after["window"]
