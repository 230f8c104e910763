"""cu_seqlens that leave out rows or are invalid: rows get zeros, other tensors do not change.

compute-sanitizer sees separate tensors if torch does not cache memory:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 \
        python tests/gpu/small_cases.py boundaries
"""

from __future__ import annotations

import random
import warnings
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

from flash_dist import flash_attn_varlen_func
from flash_dist.kernels.boundaries import CHECK_VARIABLE, warn_unchecked
from tests.gpu.boundaries import CHAOS, LEAST, LIES, MOST, SPARSE, TOTALS, Boundaries
from tests.gpu.packed import Packed, attend_packed, pack
from tests.gpu.packed import boundaries as legal_boundaries
from tests.gpu.running import workspace
from tests.reference import assert_same_bits, find_faults

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
HEAD_DIMS: Final = ((64, 64), (128, 128), (192, 128), (256, 256), (72, 40))
BUDGETS: Final = (0, 1, 1024)  # MiB: recompute dQ, store dS in chunks, store all of dS
SENTINEL: Final = 0x5A
FENCE: Final = 1 << 16  # bytes


@contextmanager
def fences(packed: Packed) -> Iterator[None]:
    """Free NaN-filled memory for the results, between tensors that must not change."""
    problem, fenced, holes = packed.problem, [], []
    lse = problem.q[..., 0].float()
    for x in (problem.q, problem.k, problem.v, problem.dout, lse) * 3:
        holes.append(torch.full((x.nbytes,), 0xFF, dtype=torch.uint8, device=x.device))
        fenced.append(torch.full((FENCE,), SENTINEL, dtype=torch.uint8, device=x.device))
    inputs = [x.clone() for x in (problem.q, problem.k, problem.v, problem.dout)]
    del holes
    yield
    for i, fence in enumerate(fenced):
        assert (fence == SENTINEL).all(), f"tensor {i} beside the results was written to"
    for x, before in zip((problem.q, problem.k, problem.v, problem.dout), inputs, strict=True):
        assert torch.equal(x, before)


def check_uncovered(boundaries: Boundaries, result: dict[str, Tensor]) -> None:
    """Require zeros and -inf outside of documents."""
    queries, keys = (x.to(result["out"].device) for x in boundaries.uncovered())
    for name, rows in (("out", queries), ("dq", queries), ("dk", keys), ("dv", keys)):
        assert (result[name][:, rows] == 0).all(), f"{name} of rows that no document covers"
    assert (result["lse"][..., queries] == -torch.inf).all(), "lse of rows without a document"


def check(boundaries: Boundaries, packed: Packed, **options: Any) -> None:  # noqa: ANN401
    """Run twice in memory full of NaN; check bits, values, and zeros in uncovered rows."""
    given = boundaries.given(packed.problem.q.device)
    with fences(packed):
        result = attend_packed(packed, given=given, **options)
    with fences(packed):
        again = attend_packed(packed, given=given, **options)
    check_uncovered(boundaries, result)
    assert_same_bits(result, again, "two runs")
    faults = find_faults(result, packed.problem)
    assert not faults, "\n".join(faults)


def check_everywhere(boundaries: Boundaries, dtype: torch.dtype) -> None:
    """Check the head_dims, kv heads and budgets that select all paths of the backward."""
    for i, (head_dim, head_dim_v) in enumerate(HEAD_DIMS):
        for num_heads_kv, megabytes in ((1, 0), (1, 1), (1, 1024), (4, 1024)):
            packed = boundaries.problem(
                num_heads=4,
                num_heads_kv=num_heads_kv,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                dtype=dtype,
                causal=i % 2 == 1,
            )
            with workspace(megabytes):
                check(boundaries, packed)
        check(boundaries, packed, batch_invariant=True)


@pytest.mark.parametrize("boundaries", SPARSE.values(), ids=SPARSE.keys())
def test_rows_that_no_document_covers_are_zeros(boundaries: Boundaries, dtype: torch.dtype) -> None:
    check_everywhere(boundaries, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("boundaries", LIES.values(), ids=LIES.keys())
def test_documents_are_cut_off_where_the_tensors_end(
    boundaries: Boundaries, dtype: torch.dtype
) -> None:
    check_everywhere(boundaries, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("boundaries", CHAOS.values(), ids=CHAOS.keys())
def test_decreasing_boundaries_write_nothing_else(
    boundaries: Boundaries, dtype: torch.dtype
) -> None:
    for megabytes in BUDGETS:
        with workspace(megabytes):
            attend_unharmed(boundaries, dtype, 64)


@pytest.mark.gpu
def test_random_numbers_as_boundaries_write_nothing_else(dtype: torch.dtype) -> None:
    chosen = random.Random(0)  # noqa: S311 - no secret

    def draw(total: int) -> int:
        low, high = chosen.choice([(LEAST, MOST), (-total, 2 * total), (0, total)])
        return chosen.randint(low, high)

    for case in range(60):
        documents = chosen.randint(1, 9)
        ends_q, ends_k = (tuple(draw(total) for _ in range(documents + 1)) for total in TOTALS)
        longest = [chosen.randint(1, total) for total in TOTALS]
        with workspace(BUDGETS[case % 3]):
            attend_unharmed(Boundaries(ends_q, ends_k, *longest), dtype, (64, 128, 256)[case % 3])


def attend_unharmed(boundaries: Boundaries, dtype: torch.dtype, head_dim: int) -> None:
    packed = SPARSE["a tail"].problem(
        num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=dtype, causal=True
    )
    with fences(packed):
        attend_packed(packed, given=boundaries.given(packed.problem.q.device))
        torch.cuda.synchronize()


def test_what_lies_in_rows_of_no_document_changes_no_bit(dtype: torch.dtype) -> None:
    boundaries = SPARSE["a tail"]
    for head_dim in (64, 128, 256):
        packed = boundaries.problem(num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=dtype)
        given = boundaries.given(packed.problem.q.device)
        clean = attend_packed(packed, given=given)
        queries, keys = (x.to(packed.problem.q.device) for x in boundaries.uncovered())
        spoilt: dict[str, Any] = {
            name: getattr(packed.problem, name).clone() for name in ("q", "k", "v", "dout")
        }
        for name, x in spoilt.items():
            x[:, keys if name in "kv" else queries] = torch.nan
        problem = replace(packed.problem, **spoilt)
        assert_same_bits(clean, attend_packed(replace(packed, problem=problem), given=given), "")


@pytest.mark.parametrize("room", [1, 77, 5000])
def test_a_tail_changes_no_bit_of_the_documents(room: int, half: torch.dtype) -> None:
    packed = pack((70, 0, 130, 65), num_heads=4, num_heads_kv=2, dtype=half, causal=True)
    problem = packed.problem
    tail: dict[str, Any] = {
        name: torch.cat((x, x.new_full((1, room, *x.shape[2:]), torch.nan)), 1)
        for name in ("q", "k", "v", "dout")
        for x in (getattr(problem, name),)
    }
    longer = replace(packed, problem=replace(problem, **tail))
    given = legal_boundaries(packed, problem.q.device)
    want = attend_packed(packed, given=given, batch_invariant=True)
    got = attend_packed(longer, given=given, batch_invariant=True)
    axes = {"out": 1, "lse": 2, "dq": 1, "dk": 1, "dv": 1}
    parts = {name: x.narrow(axes[name], 0, 265) for name, x in got.items()}
    assert_same_bits(want, parts, f"a tail of {room}")
    for name, x in got.items():
        rest = x.narrow(axes[name], 265, room)
        assert (rest == (-torch.inf if name == "lse" else 0)).all(), name


@pytest.mark.gpu
def test_a_replayed_graph_fills_what_the_new_boundaries_leave(half: torch.dtype) -> None:
    first = SPARSE["a tail"]
    packed = first.problem(num_heads=4, num_heads_kv=2, dtype=half)
    device = packed.problem.q.device
    given = replace(first, longest_q=128, longest_k=64).given(device)
    attend_packed(packed, given=given, poison=False)  # one-time work
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend_packed(packed, given=given, poison=False)
    for boundaries in (LIES["past the totals"], LIES["a head"], SPARSE["a long tail"], first):
        shorter = replace(boundaries, longest_q=128, longest_k=64)
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            given[name].copy_(shorter.given(device)[name])
        for x in captured.values():
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check_uncovered(shorter, captured)
        assert_same_bits(attend_packed(packed, given=shorter.given(device)), captured, f"{shorter}")


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [0, 2])
def test_operators_without_a_row_to_compute_fill_everything(
    documents: int, half: torch.dtype
) -> None:
    packed = SPARSE["a tail"].problem(num_heads=4, num_heads_kv=2, dtype=half)
    problem = packed.problem
    q, k, v, dout = (x[0] for x in (problem.q, problem.k, problem.v, problem.dout))
    ends = torch.arange(documents + 1, dtype=torch.int32, device=q.device)
    band, ops = [0, -1, -1, 0], torch.ops.flash_dist
    with fences(packed):
        out, lse = ops.attention(q, k, v, None, band, ends, ends, 0, 0, 0.1)
    with fences(packed):
        plan = 0.1, 1 << 30, False
        saved = dout, q, k, v, out, lse, None, None, None
        grads = ops.attention_backward(*saved, band, ends, ends, 0, 0, *plan)
    assert (lse == -torch.inf).all()
    for x in (out, *grads):
        assert (x == 0).all()


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(CHECK_VARIABLE, "1")
    warn_unchecked.cache_clear()
    yield
    warn_unchecked.cache_clear()


@pytest.mark.gpu
@pytest.mark.usefixtures("checking")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_a_checked_call_names_the_entry_that_lies(half: torch.dtype, *, causal: bool) -> None:
    said = {
        "past the totals": r"cu_seqlens_q\[2\] must be from 70 \(.*\[1\]\) to 300 .* 4000",
        "a head": r"cu_seqlens_q\[0\] must be 0, got 40",
        "keys alone, behind a head": r"cu_seqlens_k\[0\] must be 0, got 10",
        "before the tensors": r"cu_seqlens_q\[0\] must be 0, got -50",
        "longer than max_seqlen": "max_seqlen_q must be at least 150, .* got 64",
    }
    for name, message in said.items():
        packed = LIES[name].problem(num_heads=2, dtype=half, causal=causal)
        with pytest.raises(ValueError, match=message):
            attend_packed(packed, given=LIES[name].given(packed.problem.q.device))
    for boundaries in SPARSE.values():
        packed = boundaries.problem(num_heads=2, dtype=half, causal=causal)
        attend_packed(packed, given=boundaries.given(packed.problem.q.device))


@pytest.mark.gpu
@pytest.mark.usefixtures("checking")
def test_a_captured_call_warns_once_instead_of_checking(half: torch.dtype) -> None:
    boundaries = LIES["past the totals"]
    packed = boundaries.problem(num_heads=2, dtype=half)
    device = packed.problem.q.device
    attend_packed(packed, given=SPARSE["a tail"].given(device))  # one-time work
    given = boundaries.given(device)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph):
            for _ in range(2):
                captured = attend_packed(packed, given=given, poison=False)
    told = [str(x.message) for x in caught if CHECK_VARIABLE in str(x.message)]
    assert len(told) == 1, told
    assert "captured CUDA graph" in told[0]
    graph.replay()
    torch.cuda.synchronize()
    check_uncovered(boundaries, captured)


@pytest.mark.gpu
@pytest.mark.usefixtures("checking")
def test_a_compiled_call_warns_once_instead_of_checking(half: torch.dtype) -> None:
    boundaries = LIES["past the totals"]
    problem = boundaries.problem(num_heads=2, dtype=half).problem
    q, k, v = (x[0] for x in (problem.q, problem.k, problem.v))
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend="aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            out = compiled(q, k, v, **boundaries.given(q.device))
    told = [str(x.message) for x in caught if CHECK_VARIABLE in str(x.message)]
    assert len(told) == 1, told
    assert "compiled graph" in told[0]
    assert out.isfinite().all()
