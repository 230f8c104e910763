"""Packed documents: values, neighbours, no waiting for the GPU, and batch-invariant bits."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func
from tests.gpu.packed import Packed, attend_packed, boundaries, pack, starts
from tests.gpu.running import attend, no_wait_for_the_gpu, workspace
from tests.masks import masked_problem
from tests.reference import NAMES, assert_close, assert_same_bits, find_faults

if TYPE_CHECKING:
    from collections.abc import Iterator

LENGTHS_Q = (0, 1, 63, 64, 65, 0, 130, 200, 5, 0)
LENGTHS_K = (0, 3, 64, 63, 65, 40, 0, 257, 1, 0)
BANDS: dict[str, dict[str, object]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (40, 9)},
    "window-causal": {"causal": True, "window_size": (70, -1)},
}


def check(packed: Packed) -> None:
    faults = find_faults(attend_packed(packed), packed.problem)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("band", BANDS.values(), ids=BANDS.keys())
def test_documents_match_float64(
    band: dict[str, object], head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    for lengths_k in (LENGTHS_Q, LENGTHS_K):
        for group, megabytes in ((1, 1024), (4, 0)):
            with workspace(megabytes):
                check(
                    pack(
                        LENGTHS_Q,
                        lengths_k,
                        num_heads=4,
                        num_heads_kv=4 // group,
                        head_dim=head_dims[0],
                        head_dim_v=head_dims[1],
                        dtype=dtype,
                        **band,  # type: ignore[arg-type]
                    )
                )


def test_documents_of_random_lengths_match_float64(dtype: torch.dtype) -> None:
    chosen = random.Random(0)  # noqa: S311 - no secret
    for head_dim in (40, 64, 88, 128, 200, 256):
        lengths = tuple(chosen.randint(0, 300) for _ in range(7))
        for causal in (False, True):
            packed = pack(
                lengths,
                num_heads=4,
                num_heads_kv=2,
                head_dim=head_dim,
                dtype=dtype,
                causal=causal,
            )
            generator = torch.Generator(packed.problem.q.device).manual_seed(0)
            dlse = torch.randn(
                1, 4, sum(lengths), generator=generator, device=packed.problem.q.device
            )
            check(replace(packed, problem=replace(packed.problem, dlse=dlse)))


def test_one_document_is_a_plain_call(head_dims: tuple[int, int], half: torch.dtype) -> None:
    packed = pack((333,), num_heads=4, num_heads_kv=2, head_dim=head_dims[0], dtype=half)
    assert_close(attend_packed(packed), packed.problem)
    assert_same_bits(
        attend(packed.document(0), batch_invariant=True),
        attend_packed(packed, batch_invariant=True),
        "one document and a plain call",
    )


def test_a_neighbour_full_of_nan_changes_no_bit(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = pack(
        (30, 65, 100),
        (70, 65, 33),
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    problem = packed.problem
    q, k, v, dout = (x.clone() for x in (problem.q, problem.k, problem.v, problem.dout))
    for x, lengths in (
        (q, packed.lengths_q),
        (dout, packed.lengths_q),
        (k, packed.lengths_k),
        (v, packed.lengths_k),
    ):
        begin = starts(lengths)
        x[:, : begin[1]] = torch.nan
        x[:, begin[2] :] = torch.nan
    spoilt = replace(packed, problem=replace(problem, q=q, k=k, v=v, dout=dout))
    for megabytes in (0, 1024):
        with workspace(megabytes):
            clean = packed.part(attend_packed(packed), 1)
            dirty = packed.part(attend_packed(spoilt), 1)
        assert_same_bits(clean, dirty, f"{megabytes} MB")


def test_keys_of_a_document_before_every_window_are_not_read(
    head_dims: tuple[int, int], dtype: torch.dtype
) -> None:
    packed = pack(
        (150, 30, 7),
        (330, 200, 7),
        window_size=(20, 0),
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=dtype,
    )
    problem = packed.problem
    assert problem.visible is not None
    gone = ~problem.visible.flatten(0, 2).any(0).to(problem.k.device)[None, :, None, None]
    assert int(gone.sum()) == (330 - 150 - 20) + (200 - 30 - 20)  # queries that see no key
    k, v = (x.masked_fill(gone, torch.nan) for x in (problem.k, problem.v))
    spoilt = replace(packed, problem=replace(problem, k=k, v=v))
    for megabytes in (0, 1024):
        with workspace(megabytes):
            clean, result = attend_packed(packed), attend_packed(spoilt)
        assert_same_bits(clean, result, f"{megabytes} MB")


def test_a_query_axis_of_heads_per_kv_changes_no_bit(half: torch.dtype) -> None:
    packed = pack((30, 65, 100), num_heads=4, num_heads_kv=2, dtype=half, causal=True)
    problem = packed.problem
    five = replace(
        problem, q=problem.q.unflatten(2, (2, 2)), dout=problem.dout.unflatten(2, (2, 2))
    )
    result = attend_packed(replace(packed, problem=five))
    for name in ("out", "dq"):
        result[name] = result[name].flatten(2, 3)
    assert_same_bits(attend_packed(packed), result, "four and five axes")


@pytest.mark.gpu
def test_no_call_waits_for_the_gpu(half: torch.dtype) -> None:
    packed = pack((300, 0, 65, 700), num_heads=4, num_heads_kv=2, dtype=half, causal=True)
    given = boundaries(packed, packed.problem.q.device)
    attend_packed(packed, given=given, poison=False)  # one-time work
    with no_wait_for_the_gpu():
        for batch_invariant in (False, True):
            attend_packed(packed, given=given, poison=False, batch_invariant=batch_invariant)


@pytest.mark.gpu
def test_a_captured_call_follows_the_boundaries_on_the_gpu(half: torch.dtype) -> None:
    first, second = (100, 65, 0, 235), (7, 235, 158, 0)
    calls = [pack(lengths, num_heads=4, num_heads_kv=2, dtype=half) for lengths in (first, second)]
    given = boundaries(calls[0], calls[0].problem.q.device)
    attend_packed(calls[0], given=given, poison=False)  # one-time work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend_packed(calls[0], given=given, poison=False)
    for packed in (*calls, calls[0]):
        moved = boundaries(packed, packed.problem.q.device)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given[name].copy_(moved[name])
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(attend_packed(packed), captured, f"documents of {packed.lengths_q}")


@pytest.fixture
def tight_workspace() -> Iterator[None]:
    """Set a workspace that is enough for one entry alone, but not for a batch."""
    with workspace(2):
        yield


@pytest.mark.usefixtures("tight_workspace")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_document_has_the_same_bits_in_any_batch(
    *, causal: bool, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    chosen = random.Random(0)  # noqa: S311 - no secret
    lengths = tuple(chosen.randint(1, 700) for _ in range(20))
    everything = pack(
        lengths,
        num_heads=4,
        num_heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
        causal=causal,
    )
    documents = [everything.document(i) for i in range(20)]
    alone = [attend(document, batch_invariant=True) for document in documents]
    thorough = head_dims in {(128, 128), (256, 256)} and half == torch.bfloat16
    for run in range(50 if thorough else 3):
        order = chosen.sample(range(20), chosen.randint(1, 20))
        parts = [documents[i] for i in order]
        joined: dict[str, Any] = {
            name: torch.cat([getattr(part, name) for part in parts], 1)
            for name in ("q", "k", "v", "dout")
        }
        batch = replace(parts[0], **joined)
        packed = Packed(batch, *(tuple(lengths[i] for i in order) for _ in range(2)))
        result = attend_packed(packed, poison=run < 3, batch_invariant=True)
        for place, i in enumerate(order):
            part = packed.part(result, place)
            assert_same_bits(alone[i], part, f"run {run}, document {i} of {lengths[i]}")


@pytest.mark.usefixtures("tight_workspace")
@pytest.mark.parametrize("name", ["causal", "dense-per-head"])
def test_an_entry_has_the_same_bits_in_any_batch(
    name: str, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = masked_problem(
        name,
        batch=6,
        seqlen_q=200,
        seqlen_k=300,
        num_heads=4,
        num_heads_kv=1,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    together = attend(problem, batch_invariant=True)
    for i in range(6):
        tensors: dict[str, Any] = {
            x: getattr(problem, x)[i : i + 1] for x in ("q", "k", "v", "dout")
        }
        alone = attend(replace(problem, **tensors), batch_invariant=True)
        assert_same_bits(
            {x: together[x][i : i + 1] for x in NAMES}, alone, f"entry {i} in a batch and alone"
        )


def test_documents_of_no_length_alone_are_served(half: torch.dtype) -> None:
    packed = pack((0, 40, 0), (7, 0, 0), num_heads=2, dtype=half)
    result = attend_packed(packed)
    assert (result["lse"] == -torch.inf).all()
    for name in ("out", "dq", "dk", "dv"):
        assert (result[name] == 0).all(), name


def test_packed_and_padded_documents_agree(half: torch.dtype) -> None:
    packed = pack((64, 64, 64), num_heads=4, num_heads_kv=2, dtype=half, causal=True)
    q, k, v = (
        x.unflatten(1, (3, 64))[0] for x in (packed.problem.q, packed.problem.k, packed.problem.v)
    )
    out = flash_attn_func(q, k, v, causal=True, batch_invariant=True)
    result = attend_packed(packed, batch_invariant=True)
    assert torch.equal(out.flatten(0, 1), result["out"][0])
