"""A layer's mask shows the same pairs as the mask function of transformers."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.integrations.transformers.masks import make_mask
from flash_dist.masks.inputs import Shape
from flash_dist.masks.terms import BandTerm
from tests.unit.made import mask_functions as made

if TYPE_CHECKING:
    from flash_dist.integrations.transformers.layer_mask import LayerMask

Tensor = torch.Tensor

BATCH = 3
POSITIONS = torch.tensor([0, 1, 2, 3, 0, 1, 0, 0, 1, 2]).expand(BATCH, -1)
DOCUMENTS = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3, 3, 3]).expand(BATCH, -1)
LEFT = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 1], [1] * 10, [0] * 9 + [1]], dtype=torch.bool)
PADDINGS = {
    "none": None,
    "all": torch.ones(BATCH, 10, dtype=torch.bool),
    "left": LEFT,
    "right": LEFT.flip(1),
    "empty": LEFT & (torch.arange(BATCH) != 1)[:, None],
}
WINDOW = made.and_masks(made.sliding_window_overlay(3), made.causal_mask_function)
FUNCTIONS = {
    "causal": made.causal_mask_function,
    "full": made.bidirectional_mask_function,
    "window": WINDOW,
    "both-sides": made.and_masks(
        made.sliding_window_bidirectional_overlay(2), made.bidirectional_mask_function
    ),
}
GEOMETRIES = {  # queries, keys, first query position, first key position
    "prefill": (10, 10, 0, 0),
    "decode": (1, 10, 9, 0),
    "window-decode": (1, 4, 9, 6),
    "more": (4, 10, 6, 0),
    "static-prefill": (6, 10, 0, 0),
    "static-more": (3, 10, 4, 0),
    "static-decode": (1, 10, 5, 0),
}
CAUSAL = FUNCTIONS["causal"], FUNCTIONS["window"]
FORWARDS = {
    f"{name}-{kind}": (function, geometry)
    for name, function in FUNCTIONS.items()
    for kind, geometry in GEOMETRIES.items()
    if function in CAUSAL or geometry[0] in {1, geometry[1]}  # with a cache, only causal masks
}


def make(
    function: Any,  # noqa: ANN401
    geometry: tuple[int, int, Any, int] = GEOMETRIES["prefill"],
    padding: Tensor | None = None,
    **options: Any,  # noqa: ANN401
) -> Any:  # noqa: ANN401
    queries, keys, position, first = geometry
    return make_mask(
        batch_size=BATCH,
        q_length=queries,
        kv_length=keys,
        q_offset=position,
        kv_offset=first,
        mask_function=function,
        attention_mask=padding,
        config=None,
        **{"device": torch.device("cpu"), **options},
    )


def show(mask: LayerMask | Tensor | None, queries: int, keys: int) -> Tensor:
    """Return booleans [batch, queries, keys]: the keys that layers show under a mask."""
    seen = torch.zeros(BATCH, queries, keys, dtype=torch.bool)
    if isinstance(mask, Tensor):
        assert mask.shape == (BATCH, 1, 2, 1)
        assert mask.dtype == torch.int32
        numbers = torch.arange(keys)
        return (mask[:, :, 0] <= numbers) & (numbers < mask[:, :, 1])
    if mask is None:
        assert queries == 1
        return ~seen
    used = keys if mask.keys is None else mask.keys
    if mask.mask is not None:
        seen[..., :used] = mask.mask.visible(BATCH, 1, queries, used)[:, 0]
        return seen
    seen[..., :used] = BandTerm(mask.band).visible(Shape(BATCH, 1, queries, used))[0]
    if mask.segments is not None:
        assert mask.segments.shape == (BATCH, queries) == (BATCH, used)
        bounds = mask.segments.on(torch.device("cpu")).long()
        assert mask.segments.longest == int(bounds.diff().max())
        ids = torch.zeros(BATCH * queries + 1, dtype=torch.long)
        ids[bounds] = 1
        ids = ids[:-1].cumsum(0).view(BATCH, queries)
        seen[..., :used] &= ids[:, :, None] == ids[:, None, :]
    return seen


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=list(PADDINGS))
@pytest.mark.parametrize(("function", "geometry"), FORWARDS.values(), ids=list(FORWARDS))
@pytest.mark.parametrize("is_tensor", [False, True], ids=["number", "tensor"])
def test_every_query_that_is_a_token_sees_what_the_function_shows(
    function: Any,  # noqa: ANN401
    geometry: tuple[int, int, int, int],
    padding: Tensor | None,
    is_tensor: bool,  # noqa: FBT001
) -> None:
    queries, keys, position, first = geometry
    moved = torch.tensor(position) if is_tensor else position
    got = show(make(function, (queries, keys, moved, first), padding), queries, keys)
    rows, columns = range(position, position + queries), range(first, first + keys)
    want = made.evaluate(function, rows, columns, BATCH).clone()
    if padding is not None:
        want &= padding[:, None, first : first + keys]
        is_token = padding[:, position : position + queries]
        got, want = got[is_token], want[is_token]
    assert torch.equal(got, want)


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=list(PADDINGS))
def test_queries_of_a_decoder_see_the_tokens_of_as_many_encoder_states(
    padding: Tensor | None,
) -> None:
    geometry = queries, keys, _, first = GEOMETRIES["prefill"]
    got = show(make(FUNCTIONS["full"], geometry, padding), queries, keys)
    want = torch.ones(BATCH, queries, keys, dtype=torch.bool)
    if padding is not None:
        want &= padding[:, None, first : first + keys]
    assert torch.equal(got, want)


@pytest.mark.parametrize("function", [made.causal_mask_function, WINDOW], ids=["causal", "window"])
def test_documents_are_segments_and_positions_begin_anew_in_each(
    function: Any,  # noqa: ANN401
) -> None:
    packed = made.and_masks(
        made.packed_sequence_mask_function(DOCUMENTS),
        made.remap_positions_for_packed_sequence(function, POSITIONS),
    )
    mask = make(packed)
    assert mask.packed
    want = made.evaluate(packed, range(10), range(10), BATCH)
    assert torch.equal(show(mask, 10, 10), want)


@pytest.mark.parametrize("padding", [None, LEFT], ids=["none", "left"])
@pytest.mark.parametrize("function", [made.causal_mask_function, WINDOW], ids=["causal", "window"])
def test_a_graph_that_dynamo_does_not_make_holds_intervals(
    function: Any,  # noqa: ANN401
    padding: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)  # as in torch.export
    options: dict[str, Any] = {"local_size": 3} if function is WINDOW else {}
    lo, hi = make(function, padding=padding, **options).graph
    numbers = torch.arange(10)
    seen = (lo[..., None] <= numbers) & (numbers < hi[..., None])
    want = made.evaluate(function, range(10), range(10), BATCH)
    is_token = torch.ones(BATCH, 10, dtype=torch.bool) if padding is None else padding
    want = want & is_token[:, None]
    assert torch.equal(seen.expand(BATCH, -1, -1)[is_token], want[is_token])


def test_a_model_without_numbers_is_refused() -> None:
    words = r"(?s)must be on a CUDA device or the CPU, got device meta\n\nhint: .*sdpa"
    for place in ({"device": "meta"}, {"device": torch.device("meta")}):
        with pytest.raises(ValueError, match=words):
            make(WINDOW, padding=LEFT.to("meta"), **place)
    older = torch.arange(4, device="meta")
    with pytest.raises(ValueError, match=words):
        make_mask(batch_size=BATCH, kv_length=4, mask_function=WINDOW, cache_position=older)


def test_documents_that_come_back_are_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[Any] = []

    def evaluate(*, mask_function: Any, **_: object) -> Tensor:  # noqa: ANN401
        evaluated.append(mask_function)
        return made.evaluate(mask_function, range(10), range(10), BATCH)[:, None]

    monkeypatch.setitem(
        sys.modules, "transformers.masking_utils", SimpleNamespace(sdpa_mask=evaluate)
    )
    chains = torch.tensor([0, 0, 1, 1, 0, 0, 1, -1, -1, -1]).expand(BATCH, -1)
    once = torch.tensor([3, 3, 1, 1, 0, 0, 0, -1, -1, -1]).expand(BATCH, -1)
    for ids in (chains, once):
        function = made.and_masks(
            made.bidirectional_mask_function, made.packed_sequence_mask_function(ids)
        )
        want = made.evaluate(function, range(10), range(10), BATCH)
        assert torch.equal(show(make(function), 10, 10), want)
    assert len(evaluated) == 1


def test_a_mask_that_was_made_before_is_passed_on() -> None:
    mask = make(WINDOW)
    assert make(made.causal_mask_function, padding=mask) is mask
    assert mask.contiguous() is mask
    assert mask.ndim == 4


def test_one_query_that_sees_all_keys_needs_no_mask() -> None:
    for padding in ("none", "all"):
        assert make(FUNCTIONS["causal"], GEOMETRIES["decode"], PADDINGS[padding]) is None


def test_what_a_module_may_contradict_is_said_by_a_mask() -> None:
    assert make(FUNCTIONS["full"]).band.is_full  # some encoders set is_causal


@pytest.mark.parametrize("name", ["prefill", "static-prefill"])
def test_a_model_with_attention_of_its_own_gets_no_none_by_which_it_sees_later_keys(
    name: str,
) -> None:
    for padding in ("none", "all"):
        mask = make(FUNCTIONS["causal"], GEOMETRIES[name], PADDINGS[padding])
        with pytest.raises(TypeError, match="computes with its attention_mask"):
            torch.ones(2) + mask


def test_a_mask_of_several_queries_tells_for_how_many_queries_and_keys_it_is() -> None:
    packed = made.and_masks(
        made.causal_mask_function, made.packed_sequence_mask_function(DOCUMENTS)
    )
    for function, name, padding in (
        (FUNCTIONS["causal"], "prefill", "none"),
        (FUNCTIONS["window"], "prefill", "left"),
        (FUNCTIONS["causal"], "static-more", "left"),
        (packed, "prefill", "none"),
    ):
        assert make(function, GEOMETRIES[name], PADDINGS[padding]).sizes == GEOMETRIES[name][:2]


def test_older_transformers_give_positions_in_place_of_sizes() -> None:
    arguments = {"batch_size": BATCH, "kv_length": 10, "mask_function": WINDOW}
    mask = make_mask(**arguments, cache_position=torch.tensor([4, 5, 6]))
    assert torch.equal(show(mask, 3, 10), made.evaluate(WINDOW, range(4, 7), range(10), BATCH))
    once: Any = make_mask(**arguments, cache_position=torch.tensor([6]))
    assert once.flatten().tolist() == [4, 7] * BATCH


def test_a_mask_is_taken_apart_and_made_again_as_fsdp_does() -> None:
    mask = make(WINDOW, GEOMETRIES["static-prefill"])
    again = replace(mask, **{field.name: getattr(mask, field.name) for field in fields(mask)})
    assert torch.equal(show(again, 6, 10), show(mask, 6, 10))
    assert again.ndim == 4


@pytest.mark.parametrize(
    "compute",
    [
        pytest.param(lambda mask: mask[:, :, :, :2], id="slice"),
        pytest.param(lambda mask: torch.ones(2) + mask, id="add"),
        pytest.param(lambda mask: (1.0 - mask) * 5, id="subtract"),
        pytest.param(lambda mask: ~mask, id="invert"),
        pytest.param(lambda mask: mask & torch.ones(2).bool(), id="and"),
    ],
)
def test_what_computes_with_a_mask_is_refused(compute: Any) -> None:  # noqa: ANN401
    with pytest.raises(TypeError, match=r'(?s)computes with its attention_mask .*hint: .*"eager"'):
        compute(make(WINDOW))


def test_what_is_done_with_a_tensor_is_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r'(?s)reads `masked_fill` .*hint: .*"eager"'):
        make(WINDOW).masked_fill  # noqa: B018
