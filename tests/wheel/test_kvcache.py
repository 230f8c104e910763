"""Attention to a cache on the CPU, compared with float64 loops."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import flash_dist
from flash_dist.attention.decoding import cache_checks
from flash_dist.errors import FlashDistError
from tests.kvcache import SMALL, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


PROBLEMS = {**SMALL, "new keys of a chunk": Problem(seqlen_q=4, seqlen_new=4, causal=True)}


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_results_and_cache_are_those_of_loops(name: str, dtype: torch.dtype) -> None:
    problem = PROBLEMS[name]
    tensors = problem.make(dtype)
    expected = problem.solve(tensors)
    out, lse = problem.call(tensors)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 3e-2}[dtype]
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.double(), expected.out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), expected.lse, atol=tolerance, rtol=tolerance)
    rounding = 0.0 if problem.rotary_dim == 0 else tolerance
    for got, wanted in ((tensors.k_cache, expected.k_cache), (tensors.v_cache, expected.v_cache)):
        torch.testing.assert_close(got.double(), wanted, atol=rounding, rtol=rounding)


def test_keys_behind_a_sequence_are_not_read() -> None:
    problem = Problem(seqlens=(17, 40, 3), leftpad=(2, 0, 3))
    tensors = problem.make(torch.float32)
    expected = problem.solve(tensors)
    for i, (begin, end) in enumerate(zip((2, 0, 3), (17, 40, 3), strict=True)):
        for cache in (tensors.k_cache, tensors.v_cache):
            cache[i, :begin] = math.nan
            cache[i, end:] = math.nan
    out, _ = problem.call(tensors)
    torch.testing.assert_close(out.double(), expected.out, atol=2e-5, rtol=2e-5)


def test_chunks_of_a_prefill_give_what_the_prefill_gives() -> None:
    problem = Problem(seqlens=(0, 0, 0), seqlen_q=24, seqlen_new=24, causal=True)
    tensors = problem.make(torch.float64)
    whole, _ = problem.call(tensors)
    caches = torch.zeros_like(tensors.k_cache), torch.zeros_like(tensors.v_cache)
    parts = [
        flash_dist.flash_attn_with_kvcache(
            tensors.q[:, i : i + 8],
            *caches,
            tensors.k[:, i : i + 8],
            tensors.v[:, i : i + 8],
            cache_seqlens=i,
            causal=True,
        )
        for i in (0, 8, 16)
    ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-12, rtol=1e-12)


def test_a_length_may_be_an_int_and_is_the_whole_cache_where_there_is_none() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (1, 9, 9))
    whole = flash_dist.flash_attn_with_kvcache(q, k, v)
    assert torch.equal(whole, flash_dist.flash_attn_with_kvcache(q, k, v, cache_seqlens=9))
    torch.testing.assert_close(whole, flash_dist.flash_attn_func(q, k, v))


def test_packed_queries_on_pages_are_those_of_each_sequence_alone() -> None:
    problem = Problem(page=16, heads=4, heads_kv=2, causal=True)
    tensors = problem.make(torch.float64)
    ends = (0, 3, 3, 8)  # rows from 8 on are uncovered
    q = torch.randn(11, 4, 32, dtype=torch.float64)
    out, lse = flash_dist.flash_attn_varlen_func(
        q,
        tensors.k_cache,
        tensors.v_cache,
        int32(*ends),
        None,
        5,
        96,
        causal=True,
        block_table=tensors.table,
        seqused_k=tensors.seqlens,
        return_lse=True,
    )
    assert tensors.table is not None
    assert not out[8:].any()
    assert bool((lse[:, 8:] == -math.inf).all())
    for i in (0, 2):
        rows = slice(ends[i], ends[i + 1])
        arguments = problem.arguments(tensors) | {"q": q[None, rows]}
        arguments["cache_seqlens"] = tensors.seqlens[i : i + 1]
        arguments["block_table"] = tensors.table[i : i + 1]
        expected, expected_lse = flash_dist.flash_attn_with_kvcache(**arguments)
        assert torch.equal(out[rows], expected[0])
        assert torch.equal(lse[:, rows], expected_lse[0])


def test_lengths_in_pages_may_be_those_of_cu_seqlens() -> None:
    problem = Problem(page=16)
    tensors = problem.make(torch.float64)
    q, ends = tensors.q[:, 0], int32(0, 1, 2, 3)
    keys = int32(0, *torch.tensor(problem.seqlens).cumsum(0).tolist())
    ways: list[dict[str, Any]] = [
        {"cu_seqlens_k": keys},
        {"cu_seqlens_k": None, "seqused_k": tensors.seqlens},
    ]
    common: dict[str, Any] = {"cu_seqlens_q": ends, "max_seqlen_q": 1, "max_seqlen_k": 96}
    by_ends, by_number = (
        flash_dist.flash_attn_varlen_func(
            q, tensors.k_cache, tensors.v_cache, **common, **way, block_table=tensors.table
        )
        for way in ways
    )
    assert torch.equal(by_ends, by_number)
    assert torch.equal(
        by_ends,
        flash_dist.flash_attn_with_kvcache(
            tensors.q,
            tensors.k_cache,
            tensors.v_cache,
            cache_seqlens=tensors.seqlens,
            block_table=tensors.table,
        )[:, 0],
    )


def test_of_packed_keys_the_first_may_be_used() -> None:
    q, k, v = (torch.randn(n, 2, 16, dtype=torch.float64) for n in (5, 30, 30))
    ends_q, ends_k = int32(0, 2, 5), int32(0, 19, 29)
    out = flash_dist.flash_attn_varlen_func(q, k, v, ends_q, ends_k, 3, 19, seqused_k=int32(7, 100))
    first = flash_dist.flash_attn_func(q[None, :2], k[None, :7], v[None, :7])
    second = flash_dist.flash_attn_func(q[None, 2:], k[None, 19:29], v[None, 19:29])
    torch.testing.assert_close(out, torch.cat((first[0], second[0])), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
        (
            {"seqused_k": int32(1, 2, 3)},
            r"seqused_k must be contiguous with shape \[batch\], \[2\]",
        ),
        ({"cu_seqlens_k": int32(0, 4)}, "must have the same length, got 3 and 2"),
        ({"block_table": int32(0, 1)}, r"block_table must have shape \[batch, pages\], batch 2 "),
        ({"softcap": -2.0}, "softcap must be 0 or None for none, or from "),
        ({"max_seqlen_k": 1.5}, "max_seqlen_k must be an int or a tensor with one, got float"),
        ({"q": torch.tensor(1.0)}, r"q must have 3 dimensions \[total_q, num_heads_q, head_dim\]"),
        ({"q": torch.ones(2, 2, 1, 16)}, r"q must have 3 .* with block_table, got shape \[2, 2, 1"),
        ({"k": None}, "k must be a torch.Tensor, got NoneType"),
        ({"v": [1.0]}, "v must be a torch.Tensor, got list"),
        ({"k": torch.ones(16)}, r"k must have 4 dimensions \[num_pages, page_size, num_heads_kv, "),
        ({"k": torch.ones(9, 2, 16)}, r"k must have 4 dimensions .*, got shape \[9, 2, 16\]"),
        ({"v": torch.ones(9, 2, 16)}, r"v must have 4 dimensions .*, got shape \[9, 2, 16\]"),
        ({"k": torch.ones(4, 16, 2, 16).half()}, "q and k must have the same dtype, got float32"),
        ({"v": torch.ones(4, 16, 1, 16)}, "k and v must have the same shape, but for a smaller"),
        ({"k": torch.ones(4, 16, 2, 8)}, "k and v must have the same shape, but for a smaller"),
        ({"cu_seqlens_k": int32(0, 4, 3)}, r"cu_seqlens_k\[2\] must be from 4 \(cu_seqlens_k\[1\]"),
        ({"cu_seqlens_k": int32(0, 4, 21)}, r"cu_seqlens_k\[2\] must be .* to 20 \(16 keys of its"),
        ({"seqused_k": int32(3, -1)}, r"seqused_k\[1\] must be from 0 to 16 \(keys of its pages\)"),
        ({"seqused_k": int32(17, 1)}, r"seqused_k\[0\] must be from 0 to 16 .*, got 17"),
        ({"block_table": int32(0, 4).unsqueeze(1)}, r"block_table\[1\]\[0\] must be from 0 to 3 "),
    ],
)
def test_what_does_not_fit_packed_queries_is_named(changes: dict[str, Any], message: str) -> None:
    pages = torch.ones(4, 16, 2, 16)
    arguments = {
        "cu_seqlens_q": int32(0, 1, 2),
        "cu_seqlens_k": int32(0, 4, 9),
        "max_seqlen_q": 1,
        "max_seqlen_k": 32,
        "block_table": int32(0, 1).unsqueeze(1),
        "q": torch.ones(2, 2, 16),
        "k": pages,
        "v": pages,
        **changes,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        flash_dist.flash_attn_varlen_func(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.ones(2, 2, 1, 16)}, r"q must have 3 dimensions .* with seqused_k, got shape "),
        ({"k": torch.ones(1, 9, 2, 16)}, r"k must have 3 dimensions \[total_k, num_heads_kv, head"),
        ({"v": None}, "v must be a torch.Tensor, got NoneType"),
        ({"cu_seqlens_k": int32(0, 4, 10)}, r"cu_seqlens_k\[2\] must be .* to 9 \(the tokens of k"),
        ({"cu_seqlens_k": int32(0, 6, 4)}, r"cu_seqlens_k\[2\] must be from 6 \(cu_seqlens_k\[1\]"),
        ({"seqused_k": int32(3, -1)}, r"seqused_k\[1\] must be at least 0, got -1"),
    ],
)
def test_what_does_not_fit_packed_keys_is_named(changes: dict[str, Any], message: str) -> None:
    keys = torch.ones(9, 2, 16)
    arguments = {
        "cu_seqlens_q": int32(0, 1, 2),
        "cu_seqlens_k": int32(0, 4, 9),
        "max_seqlen_q": 1,
        "max_seqlen_k": 5,
        "seqused_k": int32(3, 3),
        "q": torch.ones(2, 2, 16),
        "k": keys,
        "v": keys,
        **changes,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        flash_dist.flash_attn_varlen_func(**arguments)


def test_heads_that_are_too_small_to_be_rotated_are_named() -> None:
    x, angles = torch.ones(1, 1, 2, 8), torch.ones(4, 4)
    cache = torch.zeros(1, 4, 2, 8)
    text = "head_dim must be at least 16 with rotary_cos, whose rotary_dim .*, got 8"
    with pytest.raises(ValueError, match=text):
        flash_dist.flash_attn_with_kvcache(x, cache, cache, x, x, angles, angles, 1)


@pytest.fixture
def mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMesh]:
    """Yield a mesh of this process alone."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("names", [("q",), ("k_cache", "v_cache"), ("k",)], ids=str)
def test_tensors_of_several_ranks_are_refused_by_name(
    names: tuple[str, ...], mesh: DeviceMesh
) -> None:
    shapes = {name: (2, 32 if "cache" in name else 1, 2, 16) for name in ["q", "k", "v"]}
    shapes |= dict.fromkeys(("k_cache", "v_cache"), (2, 32, 2, 16))
    tensors: dict[str, Any] = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name in names:
        tensors[name] = distribute_tensor(tensors[name], mesh, [Replicate()])
    text = (
        rf"(?s)^{names[0]} must be a tensor of .*this rank.*, got a DTensor.*`{names[0]}\.to_local"
    )
    with pytest.raises(TypeError, match=text):
        flash_dist.flash_attn_with_kvcache(**tensors, cache_seqlens=3)
    latent = {"q": tensors["q"], "k_cache": tensors["k_cache"]}
    if set(names) & set(latent):
        with pytest.raises(TypeError, match=text):
            flash_dist.flash_mla_with_kvcache(
                **latent, block_table=None, cache_seqlens=3, head_dim_v=16
            )


def test_num_splits_changes_nothing() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (1, 9, 9))
    one, four = (flash_dist.flash_attn_with_kvcache(q, k, v, num_splits=n) for n in (1, 4))
    assert torch.equal(one, four)


def test_new_keys_are_refused_within_a_transform_of_torch() -> None:
    q, k, v = (torch.randn(2, n, 2, 16) for n in (1, 9, 9))

    def decode(q: torch.Tensor) -> torch.Tensor:
        new = q[None]
        return flash_dist.flash_attn_with_kvcache(new, k, v, new, new, cache_seqlens=3)

    with pytest.raises(
        FlashDistError, match=r"k and v must be given outside of torch\.func .*, got them"
    ):
        torch.vmap(decode)(q)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": int32(3, 33, 1)}, r"cache_seqlens\[1\] must be from 0 to 32 "),
        ({"cache_seqlens": int32(3, -1, 1)}, r"cache_seqlens\[1\] must be from 0 to 32 "),
        (
            {"cache_seqlens": int32(3, 1, 1), "cache_leftpad": int32(0, 2, 0)},
            r"cache_leftpad\[1\] must be from 0 to 1 ",
        ),
        ({"cache_batch_idx": int32(0, 1, 3)}, r"cache_batch_idx\[2\] must be from 0 to 2 "),
        (
            {"block_table": int32(0, 1, 2).unsqueeze(1) + 1},
            r"block_table\[2\]\[0\] must be from 0 to 2 ",
        ),
        ({"cache_seqlens": 33}, r"cache_seqlens must be from 0 to 32 \(32 keys .*, got 33"),
        ({"cache_seqlens": -1}, r"cache_seqlens must be from 0 to 32 \(32 keys .*, got -1"),
        ({"cache_seqlens": torch.tensor(2**40)}, "cache_seqlens must be from 0 to 32 .* got 1099"),
        ({"cache_seqlens": int32(3, 1)}, r"cache_seqlens must be contiguous with shape \[batch\]"),
        ({"softcap": -2.0}, "softcap must be 0 or None for none, or from "),
        ({"alibi_slopes": torch.ones(4)}, r"alibi_slopes must have shape \[num_heads_q\] or "),
        ({"num_splits": -1}, "num_splits must be a whole number of at least 0, got -1"),
        ({"k": torch.ones(3, 1, 2, 16)}, "k, v and cache_seqlens must be given together, got k a"),
        (
            {"rotary_cos": torch.ones(40, 8), "rotary_sin": torch.ones(40, 8)},
            "rotary_cos and rotary_sin must be given together, .* rotary_sin a tensor, k None",
        ),
        ({"q": torch.ones(4, 1, 2, 16)}, "k_cache must have an entry for each of 4 batch entries"),
        ({"q": torch.ones(3, 1, 3, 16)}, "num_heads_kv must divide num_heads_q, got 2 "),
        ({"q": torch.ones(3, 1, 2, 24)}, "q and k_cache must agree in head_dim, got 24 and 16"),
        (
            {
                "block_table": int32(0, 1, 2).unsqueeze(1),
                "cache_leftpad": int32(0, 0, 0),
            },
            "cache_leftpad must be None with block_table",
        ),
        (
            {"block_table": torch.zeros(9, 1).int(), "cache_batch_idx": int32(4, 0, 2)},
            r"(?s)cache_batch_idx must be None with .*hint: `block_table\[cache_batch_idx\]` has",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.ones(3, 1, 2, 16),
        "k_cache": torch.ones(3, 32, 2, 16),
        "v_cache": torch.ones(3, 32, 2, 16),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        flash_dist.flash_attn_with_kvcache(**arguments)


def call_fake(q: torch.Tensor, cache: torch.Tensor, number: int) -> None:
    with FakeTensorMode() as mode:
        q, cache = mode.from_tensor(q), mode.from_tensor(cache)
        flash_dist.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=number)


def call_compiled(q: torch.Tensor, cache: torch.Tensor, number: int) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def decode(q: torch.Tensor, cache: torch.Tensor, number: int) -> torch.Tensor:
        return flash_dist.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=number)

    for one in (5, 9, number):
        decode(q, cache, one)


SHARED: Final = torch.zeros(3, 32, 2, 16)


@pytest.mark.parametrize("number", [33, -1])
@pytest.mark.parametrize("call", [call_fake, call_compiled])
def test_an_int_beyond_the_cache_is_refused_where_tensors_have_no_numbers(
    call: Callable[[torch.Tensor, torch.Tensor, int], None], number: int
) -> None:
    text = rf"cache_seqlens must be from 0 to 32 \(32 keys of the cache\), got {number}"
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match=text):
        call(torch.ones(3, 1, 2, 16), torch.ones(3, 32, 2, 16), number)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_leftpad": int32(4, 0)}, r"cache_leftpad\[0\] must be from 0 to 3 "),
        ({"cache_batch_idx": int32(2, 2)}, r"cache_batch_idx\[1\] must be another entry than "),
        ({"cache_seqlens": 30}, r"cache_seqlens must be from 0 to 29 .* less 3 new\), got 30"),
        (
            {"cache_seqlens": int32(3, 30)},
            r"cache_seqlens\[1\] must be from 0 to 29 .*, got 30",
        ),
        (
            {"rotary_cos": torch.ones(11, 8), "rotary_sin": torch.ones(11, 8)},
            r"at least 12 rows, .* \(cache_seqlens\[1\] is 9, 3 new\), got 11",
        ),
        (
            {"k_cache": torch.zeros(1, 32, 2, 16).expand(3, -1, -1, -1)},
            r"(?s)k_cache must not be expanded where new keys are written, .*hint: `k_cache\.conti",
        ),
        (
            dict.fromkeys(("k_cache", "v_cache"), SHARED),
            "k_cache and v_cache must lie in different memory where new keys are written, got both",
        ),
        ({"v": torch.ones(2, 2, 2, 16)}, r"v must have shape .*, got \[2, 2, 2, 16\]"),
        ({"learnable_sink": torch.ones(3)}, r"learnable_sink must have shape \[num_heads_q\]"),
        ({"rotary_cos": torch.ones(9, 8)}, "rotary_cos and rotary_sin must be given together"),
    ],
)
def test_nothing_is_written_by_a_call_that_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    caches = [torch.zeros(3, 32, 2, 16) for _ in range(2)]
    new = torch.ones(2, 3, 2, 16)
    arguments: dict[str, Any] = {
        **dict(zip(("k_cache", "v_cache"), caches, strict=True)),
        "q": torch.ones(2, 3, 2, 16),
        "cache_seqlens": int32(3, 9),
        "k": new,
        "v": new,
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        flash_dist.flash_attn_with_kvcache(**arguments)
    assert not any(arguments[name].any() for name in ("k_cache", "v_cache"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"cache_seqlens": torch.ones(3, dtype=torch.int64)},
            r"(?s)cache_seqlens must be int32, got int64.*hint: `cache_seqlens\.int\(\)`",
        ),
        ({"cache_seqlens": 1.5}, r"cache_seqlens must be an int or an int32 tensor .*, got float"),
        ({"cache_seqlens": torch.tensor(1.5)}, r"an int or an int32 .* \[\] and dtype float32"),
        ({"q": torch.ones(3, 1, 2, 16, dtype=torch.int32)}, "q must be float16, bfloat16, "),
        ({"k_cache": torch.ones(3, 32, 2, 16).half()}, "q and k_cache must have the same dtype"),
        ({"return_softmax_lse": torch.ones(2)}, "return_softmax_lse must be True or False, got T"),
        (
            {"cache_seqlen": 3},
            r"(?s)unexpected keyword argument 'cache_seqlen'.*hint: did you mean `cache_seqlens`\?",
        ),
        (
            {"dropout_p": 0.0},
            r"flash_attn_with_kvcache\(\) got an unexpected keyword argument 'dropout_p'$",
        ),
        ({"colour": 1}, r"flash_attn_with_kvcache\(\) got an unexpected keyword argument 'colour'"),
    ],
)
def test_what_is_of_another_type_is_named(changes: dict[str, Any], message: str) -> None:
    arguments = {
        "q": torch.ones(3, 1, 2, 16),
        "k_cache": torch.ones(3, 32, 2, 16),
        "v_cache": torch.ones(3, 32, 2, 16),
        **changes,
    }
    with pytest.raises(TypeError, match=message):
        flash_dist.flash_attn_with_kvcache(**arguments)


@pytest.mark.parametrize("name", ["grouped", "pages", "new keys in pages", "rotary"])
def test_operators_are_what_torch_expects_of_operators(name: str) -> None:
    problem = PROBLEMS[name]
    tensors = problem.make(torch.float32)
    for operator, arguments in problem.operator_calls(tensors):
        torch.library.opcheck(operator, arguments)


class Names(TorchDispatchMode):
    """Records the names of our operators."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func.namespace == "flash_dist":
            self.seen.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("default")  # torch's profiler has warnings of its own
@pytest.mark.parametrize("name", PROBLEMS)
def test_out_alone_has_the_same_bits(name: str) -> None:
    problem = PROBLEMS[name]
    tensors, others, third = (problem.make(torch.float32) for _ in range(3))
    out, _ = problem.call(tensors)
    arguments = problem.arguments(others) | {"return_softmax_lse": False}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        alone = flash_dist.flash_attn_with_kvcache(**arguments)
    names = {x.name for x in profile.events() if x.name.startswith("flash_dist::decode")}
    few = others.batch_idx is others.leftpad is others.slopes is others.sinks is None
    few = few and problem.softcap == 0
    assert names == {"flash_dist::decode_no_lse" if few else "flash_dist::decode"}
    arguments = problem.arguments(third) | {"return_softmax_lse": False}
    with Names() as watch:
        watched = flash_dist.flash_attn_with_kvcache(**arguments)
    assert watch.seen[-1] == "flash_dist::decode"
    assert torch.equal(alone, out)
    assert torch.equal(watched, out)


def test_the_operator_of_out_alone_is_what_torch_expects_of_operators() -> None:
    problem = PROBLEMS["pages"]
    tensors = problem.make(torch.float32)
    caches = tensors.k_cache, tensors.v_cache
    where = tensors.seqlens, tensors.table
    numbers = problem.head_dim**-0.5, -1, 0, problem.seqlen_new, 1 << 20
    operator = torch.ops.flash_dist.decode_no_lse
    torch.library.opcheck(operator, (tensors.q, *caches, *where, *numbers))


@pytest.mark.filterwarnings("ignore")  # torch.jit.trace is deprecated, and warns of constants
def test_a_traced_step_holds_the_operator_that_graphs_hold() -> None:
    q = torch.linspace(-1, 1, 64).view(1, 2, 2, 16)
    cache = torch.linspace(-1, 1, 32 * 32).view(1, 32, 2, 16)
    call = flash_dist.flash_attn_with_kvcache
    want = call(q, cache, cache)
    known = cache_checks._check_once.cache_info().currsize
    traced = torch.jit.trace(call, (q, cache, cache), check_trace=False)
    assert "flash_dist::decode(" in str(traced.graph)
    assert torch.equal(traced(q, cache, cache), want)
    assert cache_checks._check_once.cache_info().currsize == known


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grouped", "new keys in pages", "rotary"])
def test_a_compiled_graph_gives_what_eager_gives(name: str) -> None:
    problem = PROBLEMS[name]
    tensors, others = problem.make(torch.float32), problem.make(torch.float32)
    out, lse = problem.call(tensors)
    compiled = torch.compile(problem.call, backend="aot_eager", fullgraph=True)
    got, got_lse = compiled(others)
    assert torch.equal(out, got)
    assert torch.equal(lse, got_lse)
    assert torch.equal(tensors.k_cache, others.k_cache)


def cached(q: torch.Tensor) -> torch.Tensor:
    k, v = (torch.linspace(-1, 1, 32 * 32).view(1, 32, 2, 16).roll(i, 1) for i in (0, 1))
    return flash_dist.flash_attn_with_kvcache(q, k, v).sum()


def packed(k: torch.Tensor) -> torch.Tensor:
    ends, used, table = (torch.tensor(x, dtype=torch.int32) for x in ([0, 1], [20], [[0, 1]]))
    q = torch.ones(1, 2, 16)
    options: Any = {"block_table": table, "seqused_k": used}
    out: torch.Tensor = flash_dist.flash_attn_varlen_func(q, k, k, ends, None, 1, 32, **options)
    return out.sum()


def latent(q: torch.Tensor) -> torch.Tensor:
    lengths, table = (torch.tensor(x, dtype=torch.int32) for x in ([20], [[0, 1]]))
    cache = torch.linspace(-1, 1, 2048).view(2, 16, 1, 64)
    return flash_dist.flash_mla_with_kvcache(q, cache, table, lengths, 32)[0].sum()


@pytest.mark.parametrize(
    ("call", "shape"),
    [(cached, (1, 1, 2, 16)), (packed, (2, 16, 2, 16)), (latent, (1, 1, 4, 64))],
)
def test_what_has_no_gradients_says_so_to_torch_func(
    call: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...]
) -> None:
    x = torch.randn(shape)
    with pytest.raises(FlashDistError, match=r"has no gradients, got \w+ within torch\.func"):
        torch.func.grad(call)(x)
    with pytest.raises(FlashDistError, match="has no gradients"):
        torch.vmap(torch.func.grad(call))(x[None])
    assert torch.vmap(call)(x[None]).shape == (1,)
    by_scale = torch.func.grad(lambda scale: scale * call(x))(torch.tensor(2.0))
    assert torch.equal(by_scale, call(x))  # not an input of this graph
