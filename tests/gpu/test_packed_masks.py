"""Masks of packed sequences: values, the bits of one sequence, graphs, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flash_dist import BlockMask, IntervalMask, flash_attn_func, flash_attn_varlen_func
from tests.gpu.packed import Packed, attend_packed, boundaries, pack, starts
from tests.gpu.running import attend, no_wait_for_the_gpu, workspace
from tests.masks import MASKS, Sizes
from tests.reference import DEVICE, assert_close, assert_same_bits, find_faults

Tensor = torch.Tensor
LENGTHS_Q = (0, 1, 63, 64, 65, 0, 130, 200, 5, 33)
LENGTHS_K = (0, 3, 64, 63, 65, 40, 0, 257, 1, 33)
MIXED = (
    *("prefix", "block-causal", "causal-object", "sixteen-blocks", "window-object"),
    *("padding-and-causal", "causal-top-left", "intervals-per-head", "documents-causal", "nothing"),
)
TREES = (*("dense", "tiles", "prefix", "block-causal-unsorted", "dense-per-head"),) * 2


def pack_masked(
    names: tuple[str, ...],
    lengths_k: tuple[int, ...],
    **shape: Any,  # noqa: ANN401 - of random_problem
) -> Packed:
    """Return random sequences, each with a mask of its own."""
    packed = pack(LENGTHS_Q, lengths_k, **shape)
    heads = packed.problem.q.shape[2]
    seen = packed.problem.visible
    assert seen is not None
    seen = seen.repeat(1, heads, 1, 1)
    masks = []
    ends = zip(names, LENGTHS_Q, lengths_k, starts(LENGTHS_Q), starts(lengths_k), strict=False)
    for name, queries, keys, top, left in ends:
        if 0 in {queries, keys}:
            masks.append(BlockMask.full())
            continue
        shown = MASKS[name](Sizes(1, heads, queries, keys))
        assert shown.visible is not None
        seen[:, :, top : top + queries, left : left + keys] = shown.visible.to(seen.device)
        masks.append(shown.options["mask"])
    mask = BlockMask.packed(masks, starts(LENGTHS_Q), starts(lengths_k))
    problem = replace(packed.problem, visible=seen, options={"mask": mask}, name="masks in a pack")
    return replace(packed, problem=problem)


def find_bounds(seen: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Return lo and hi of rows without gaps, counted from the first key of each sequence."""
    keys = torch.arange(seen.shape[-1], device=seen.device)
    lengths = torch.tensor(packed.lengths_q, device=seen.device)
    first = torch.tensor(starts(packed.lengths_k)[:-1], device=seen.device)
    first = first.repeat_interleave(lengths)
    lo = torch.where(seen, keys, seen.shape[-1]).amin(-1) - first
    hi = torch.where(seen, keys + 1, 0).amax(-1) - first
    return lo, hi


def as_intervals(packed: Packed) -> Packed:
    """Return the same call with a mask of tensors on the device."""
    seen = packed.problem.visible
    assert seen is not None
    ends = boundaries(packed, seen.device)
    lo, hi = find_bounds(seen, packed)
    mask = IntervalMask.packed(
        lo, hi, ends["cu_seqlens_q"], ends["cu_seqlens_k"], total_k=seen.shape[-1]
    )
    return replace(packed, problem=replace(packed.problem, options={"mask": mask}))


def test_sequences_with_masks_match_float64(head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    shape: dict[str, Any] = {"num_heads": 4, "num_heads_kv": 2, "dtype": dtype}
    shape |= {"head_dim": head_dims[0], "head_dim_v": head_dims[1]}
    mixed = pack_masked(MIXED, LENGTHS_K, **shape)
    faults = []
    for packed in (mixed, as_intervals(mixed), pack_masked(TREES, LENGTHS_Q, **shape)):
        faults += find_faults(attend_packed(packed), packed.problem)
    assert not faults, "\n".join(faults)


def test_they_do_without_a_workspace(half: torch.dtype) -> None:
    for head_dim in (64, 256):
        mixed = pack_masked(MIXED, LENGTHS_Q, num_heads=2, head_dim=head_dim, dtype=half)
        for packed in (as_intervals(mixed), pack_masked(TREES, LENGTHS_K, num_heads=2, dtype=half)):
            with workspace(0):
                assert_close(attend_packed(packed), packed.problem)


def test_one_sequence_has_the_bits_of_a_plain_call(half: torch.dtype) -> None:
    packed = pack((333,), num_heads=4, num_heads_kv=2, dtype=half)
    mask = BlockMask.prefix([70])
    packs = BlockMask.packed(mask, [0, 333])
    assert_same_bits(
        attend(packed.document(0), mask=mask), attend_packed(packed, mask=packs), "one and plain"
    )


def test_a_mask_that_is_a_band_is_that_of_each_sequence(half: torch.dtype) -> None:
    packed = pack(LENGTHS_Q, LENGTHS_K, causal=True, window_size=(70, 0), dtype=half)
    want = attend_packed(packed, batch_invariant=True)
    plain = replace(packed, problem=replace(packed.problem, options={}))
    mask = BlockMask.sliding_window(70, 0)
    got = attend_packed(plain, mask=mask, batch_invariant=True)
    assert_same_bits(got, want, "mask and window_size")


def test_scores_and_tokens_of_no_sequence(half: torch.dtype) -> None:
    packed = pack((70, 50, 30), num_heads=2, dtype=half)
    mask = BlockMask.packed(BlockMask.prefix([9, 50, 0]), [0, 70, 120, 150])
    sinks = torch.tensor([0.5, -1.0], device=DEVICE)
    softer = attend_packed(packed, mask=mask, softcap=5.0, sinks=sinks)
    used = {name: torch.tensor([0, 70, 120], dtype=torch.int32, device=DEVICE) for name in "qk"}
    given: dict[str, Any] = {"cu_seqlens_q": used["q"], "cu_seqlens_k": used["k"]}
    given |= dict.fromkeys(("max_seqlen_q", "max_seqlen_k"), 70)
    fewer = BlockMask.packed(BlockMask.prefix([9, 50]), [0, 70, 120], total_q=150)
    for x in (packed.problem.k, packed.problem.v):
        x[:, 120:] = torch.nan
    part = attend_packed(packed, mask=fewer, softcap=5.0, sinks=sinks, given=given)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(part[name][:, :120], softer[name][:, :120])
        assert not part[name][:, 120:].any()
    assert torch.equal(part["lse"][..., :120], softer["lse"][..., :120])
    assert torch.equal(part["lse"][..., 120:], sinks[None, :, None].expand(1, 2, 30))


@pytest.mark.gpu
def test_a_mask_of_tensors_waits_for_nothing_and_is_captured() -> None:
    packed = pack((70, 120, 10), num_heads=4, dtype=torch.bfloat16)
    q, k, v = (
        x[0].requires_grad_() for x in (packed.problem.q, packed.problem.k, packed.problem.v)
    )
    ends = torch.tensor([0, 70, 190, 200], dtype=torch.int32, device=DEVICE)
    lo = torch.zeros(200, dtype=torch.int32, device=DEVICE)

    def step() -> list[Tensor]:
        mask = IntervalMask.packed(lo, lo + 1000, ends, causal=True)
        out = flash_attn_varlen_func(q, k, v, ends, ends, 200, 200, mask=mask)
        grads = torch.autograd.grad(out, (q, k, v), packed.problem.dout[0])
        return [out.detach(), *grads]  # a graph kept alive would keep its stream, too

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    with no_wait_for_the_gpu():
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for places in ([0, 1, 64, 200], [0, 100, 100, 180]):
        ends.copy_(torch.tensor(places, dtype=torch.int32, device=DEVICE))
        graph.replay()
        for got, want in zip(found, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.filterwarnings("default")
def test_one_graph_of_torch_compile_serves_masks_of_all_packs(any_half: torch.dtype) -> None:
    torch._dynamo.reset()

    def attention(q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        lo = torch.zeros(q.shape[0], dtype=torch.int32, device=q.device)
        mask = IntervalMask.packed(lo, lo + longest, ends, causal=True)
        return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, mask=mask)

    backend = "inductor" if DEVICE != "cpu" else "aot_eager"
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    for lengths in ((70, 50), (3, 64), (100, 1)):
        packed = pack(lengths, dtype=any_half, causal=True)
        q, k, v = (
            x[0].clone().requires_grad_()
            for x in (packed.problem.q, packed.problem.k, packed.problem.v)
        )
        ends = boundaries(packed, q.device)["cu_seqlens_q"]
        got, want = (f(q, k, v, ends, max(lengths)) for f in (compiled, attention))
        assert torch.equal(got, want)
        grads = [torch.autograd.grad(out, (q, k, v), packed.problem.dout[0]) for out in (got, want)]
        for ours, theirs in zip(*grads, strict=True):
            assert torch.equal(ours, theirs)


def test_block_masks_of_packs_are_arguments_of_compiled_functions(any_half: torch.dtype) -> None:
    torch._dynamo.reset()
    backend = "inductor" if DEVICE != "cpu" else "aot_eager"
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend=backend)
    for lengths in ((70, 50), (3, 64)):
        packed = pack(lengths, dtype=any_half)
        q, k, v = (x[0] for x in (packed.problem.q, packed.problem.k, packed.problem.v))
        mask = BlockMask.packed(BlockMask.prefix([2, 30]), starts(lengths))
        given = boundaries(packed, q.device)
        got = compiled(q, k, v, **given, mask=mask)
        assert torch.equal(got, flash_attn_varlen_func(q, k, v, **given, mask=mask))
        plain = flash_attn_func(q[None], k[None], v[None], mask=mask)
        assert torch.equal(got, plain[0])


ENDS = [0, 40, 100]
PREFIX = BlockMask.packed(BlockMask.prefix([3, 9]), ENDS)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no pack": (
        {"mask": BlockMask.documents([0] * 100)},
        "mask must keep 2 packed sequences apart, got one that does not: <BlockMask documents",
    ),
    "another size": (
        {"mask": BlockMask.packed(BlockMask.prefix([3, 9]), [0, 40, 99])},
        "seqlen_q must be 99, the size that the mask was made for, got 100",
    ),
    "causal": ({"mask": PREFIX, "causal": True}, "mask cannot be given together with causal=True"),
    "batch_invariant": (
        {"mask": PREFIX, "batch_invariant": True},
        "batch_invariant must be False with a mask of packed sequences, got True",
    ),
    "alibi_slopes": (
        {"mask": PREFIX, "alibi_slopes": torch.ones(2)},
        "alibi_slopes must be None with a mask of packed sequences, got slopes",
    ),
    "match_kvcache": (
        {"mask": PREFIX, "match_kvcache": True},
        "match_kvcache must be False with this mask, got True and <BlockMask packed",
    ),
    "seqused_k": (
        {"mask": PREFIX, "seqused_k": torch.ones(2, dtype=torch.int32)},
        "mask must be None with block_table and seqused_k, got <BlockMask packed",
    ),
}


@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=REFUSED)
def test_what_no_kernel_does_is_refused(
    options: dict[str, Any], words: str, any_half: torch.dtype
) -> None:
    packed = pack((40, 60), dtype=any_half)
    plain = replace(packed, problem=replace(packed.problem, options={}))
    given: dict[str, Any] = dict(options)
    for key, x in options.items():
        given[key] = x.to(DEVICE) if isinstance(x, Tensor) else x
    with pytest.raises(ValueError, match=words):
        attend_packed(plain, **given)


@pytest.mark.parametrize("made", ["BlockMask", "IntervalMask"])
def test_a_mask_of_other_sequences_is_found(
    made: str, any_half: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLASH_DIST_CHECK", "1")
    packed = pack((40, 60), dtype=any_half)
    plain = replace(packed, problem=replace(packed.problem, options={}))
    lo = torch.zeros(100, dtype=torch.int64, device=DEVICE)
    for ends, fits in ((ENDS, True), ([0, 50, 100], False)):
        mask: Any = BlockMask.packed(BlockMask.prefix([3, 9]), ends)
        if made == "IntervalMask":
            mask = IntervalMask.packed(lo, lo + 99, torch.tensor(ends, device=DEVICE))
        if fits:
            attend_packed(plain, mask=mask)
            continue
        with pytest.raises(ValueError, match="made for the sequences of the call, got one for oth"):
            attend_packed(plain, mask=mask)


def test_forms_in_one_tensor_take_masks(any_half: torch.dtype) -> None:
    from flash_dist import (  # noqa: PLC0415
        flash_attn_varlen_kvpacked_func,
        flash_attn_varlen_qkvpacked_func,
    )

    packed = pack((40, 60), dtype=any_half)
    q, k, v = (x[0] for x in (packed.problem.q, packed.problem.k, packed.problem.v))
    ends = torch.tensor(ENDS, dtype=torch.int32, device=DEVICE)
    want = flash_attn_varlen_func(q, k, v, ends, ends, 60, 60, mask=PREFIX)
    assert_close(
        attend_packed(replace(packed, problem=_masked(packed)), mask=PREFIX), _masked(packed)
    )
    qkv, kv = torch.stack([q, k, v], 1), torch.stack([k, v], 1)
    assert torch.equal(flash_attn_varlen_qkvpacked_func(qkv, ends, 60, mask=PREFIX), want)
    got = flash_attn_varlen_kvpacked_func(q, kv, ends, ends, 60, 60, mask=PREFIX)
    assert torch.equal(got, want)


def _masked(packed: Packed) -> Any:  # noqa: ANN401 - a Problem
    seen = PREFIX.visible(1, 2, 100, 100).to(DEVICE)
    return replace(packed.problem, visible=seen, options={})
