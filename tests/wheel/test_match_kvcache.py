"""match_kvcache on the CPU: training has the bits of a cache, for any number of queries at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flash_dist
from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
    match_kvcache,
)
from flash_dist.errors import FlashDistError
from flash_dist.integrations import torch_sdpa
from flash_dist.kernels.problem import NOT_PACKED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
BATCH, SEQLEN, HEADS, HEADS_KV, HEAD_DIM = 2, 75, 4, 2, 24
CHUNKS = ((0, 1), (1, 20), (20, 64), (64, SEQLEN))


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


class Call(NamedTuple):
    """Queries, keys and values, and the options of their attention."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: dict[str, Any]

    @classmethod
    def of(cls, dtype: torch.dtype = torch.float32, **options: Any) -> Call:  # noqa: ANN401
        q = draw(BATCH, SEQLEN, HEADS, HEAD_DIM, dtype=dtype)
        k = draw(BATCH, SEQLEN, HEADS_KV, HEAD_DIM, dtype=dtype)
        return cls(q, k, draw(BATCH, SEQLEN, HEADS_KV, 16, dtype=dtype), options)

    def attend(self) -> Pair:
        """Return out and lse of the function for training."""
        out, lse = flash_attn_func(
            *self[:3], return_lse=True, match_kvcache=True, causal=True, **self.options
        )
        return out, lse

    def decode(self, begin: int, end: int, page: int = 0) -> Pair:
        """Return out and lse of some queries to a cache, in pages or not."""
        caches, table = list(self[1:3]), None
        if page:
            table = torch.randperm(BATCH * SEQLEN).reshape(BATCH, -1).int()[:, : -(-SEQLEN // page)]
            for i, x in enumerate(caches):
                pages = x.new_zeros(BATCH * SEQLEN, page, *x.shape[2:])
                padded = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -SEQLEN % page))
                pages[table.flatten().long()] = padded.reshape(-1, page, *x.shape[2:])
                caches[i] = pages
        with match_kvcache():
            out, lse = flash_attn_with_kvcache(
                self.q[:, begin:end],
                *caches,
                cache_seqlens=end,
                block_table=table,
                causal=True,
                return_softmax_lse=True,
                **self.options,
            )
        return out, lse


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window_size": (11, 0)},
    "soft cap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": torch.linspace(0.01, 0.2, HEADS)},
    "slopes of each": {"alibi_slopes": torch.linspace(0.01, 0.2, BATCH * HEADS).view(BATCH, HEADS)},
    "sinks": {"learnable_sink": torch.linspace(-1, 2, HEADS)},
    "all": {
        "window_size": (30, 0),
        "softcap": 1.5,
        "alibi_slopes": torch.linspace(0.01, 0.2, HEADS),
        "learnable_sink": torch.linspace(-1, 2, HEADS),
    },
}


def assert_same(got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert torch.equal(x, y), f"{int((x != y).sum())} of {x.numel()} differ"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_query_has_the_bits_of_a_cache(options: dict[str, Any], dtype: torch.dtype) -> None:
    call = Call.of(dtype, **options)
    out, lse = call.attend()
    assert_same(call.decode(0, SEQLEN), (out, lse))
    assert_same(call.decode(0, SEQLEN, page=16), (out, lse))
    single = [(i, i + 1) for i in range(0, SEQLEN, 7)]
    for begin, end in (*CHUNKS, *single):
        assert_same(call.decode(begin, end), (out[:, begin:end], lse[:, :, begin:end]))


def test_it_is_another_order_of_the_same_sums() -> None:
    call = Call.of()
    out, _ = call.attend()
    plain = flash_attn_func(*call[:3], causal=True)
    assert not torch.equal(out, plain)
    torch.testing.assert_close(out, plain, atol=2e-6, rtol=2e-6)


def test_a_sequence_is_the_same_alone_and_packed() -> None:
    call = Call.of()
    out, lse = call.attend()
    alone = call._replace(q=call.q[1:], k=call.k[1:], v=call.v[1:])
    assert_same(alone.attend(), (out[1:], lse[1:]))
    ends = torch.tensor([0, SEQLEN, 2 * SEQLEN], dtype=torch.int32)
    packed = flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in call[:3]),
        *(ends, ends, SEQLEN, SEQLEN),
        causal=True,
        return_lse=True,
        match_kvcache=True,
    )
    assert_same(packed, (out.flatten(0, 1), lse.transpose(0, 1).flatten(1)))


def test_gradients_are_those_of_float64() -> None:
    call = Call.of(torch.float64, softcap=2.0)
    leaves = [x.requires_grad_() for x in call[:3]]
    for invariant in (False, True):
        got, expected = (
            torch.autograd.grad(
                flash_attn_func(
                    *leaves,
                    causal=True,
                    match_kvcache=matched,
                    batch_invariant=invariant,
                    **call.options,
                )
                .square()
                .sum(),
                leaves,
            )
            for matched in (True, False)
        )
        for x, y in zip(got, expected, strict=True):
            torch.testing.assert_close(x, y, atol=1e-11, rtol=1e-11)


# --- The choice -----------------------------------------------------------------------------------


class Calls(TorchDispatchMode):
    """Records, for each of our operators that ran, whether it matched a cache."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call, unused-ignore]
        self.seen: list[bool] = []

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: object,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        names = [argument.name for argument in func._schema.arguments]
        if "match_kvcache" in names:
            place = names.index("match_kvcache")
            self.seen.append(len(args) > place and bool(args[place]))  # defaults are omitted
        return func(*args, **(kwargs or {}))


ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "flash_attn_func": lambda **options: flash_attn_func(
        draw(1, 5, 4, 16), draw(1, 7, 2, 16), draw(1, 7, 2, 16), **options
    ),
    "qkvpacked": lambda **options: flash_attn_qkvpacked_func(draw(1, 5, 3, 2, 16), **options),
    "kvpacked": lambda **options: flash_attn_kvpacked_func(
        draw(1, 5, 2, 16), draw(1, 7, 2, 2, 16), **options
    ),
    "varlen": lambda **options: flash_attn_varlen_func(
        draw(9, 4, 16), draw(9, 2, 16), draw(9, 2, 16), ENDS, ENDS, 5, 5, **options
    ),
    "varlen_qkvpacked": lambda **options: flash_attn_varlen_qkvpacked_func(
        draw(9, 3, 2, 16), ENDS, 5, **options
    ),
    "varlen_kvpacked": lambda **options: flash_attn_varlen_kvpacked_func(
        draw(9, 2, 16), draw(9, 2, 2, 16), ENDS, ENDS, 5, 5, **options
    ),
}


def replaced() -> Tensor:
    with flash_dist.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(*heads_first())


def heads_first() -> tuple[Tensor, Tensor, Tensor]:
    return draw(1, 2, 5, 16), draw(1, 2, 5, 16), draw(1, 2, 5, 16)


OF_TORCH: dict[str, Callable[[], Any]] = {
    "scaled_dot_product_attention": lambda: flash_dist.scaled_dot_product_attention(*heads_first()),
    "flex_attention": lambda: flash_dist.flex_attention(*heads_first()),
    "sdpa": replaced,
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_an_argument_reaches_the_operator(function: Callable[..., Any]) -> None:
    with Calls() as calls:
        function(match_kvcache=True)
        with match_kvcache():
            function(match_kvcache=False)
    assert calls.seen == [True, False]


@pytest.mark.parametrize(
    "function", [*FUNCTIONS.values(), *OF_TORCH.values()], ids=[*FUNCTIONS, *OF_TORCH]
)
def test_a_block_goes_for_every_function(function: Callable[..., Any]) -> None:
    with Calls() as calls:
        with match_kvcache():
            function()
        function()
    assert calls.seen == [True, False]


@pytest.fixture
def provider() -> Iterator[None]:
    torch_sdpa.activate()
    yield
    torch_sdpa.deactivate()


@pytest.mark.usefixtures("provider")
def test_what_goes_to_torch_is_refused() -> None:
    q = draw(1, 2, 5, 16)
    with (
        match_kvcache(),
        flash_dist.sdpa(),
        pytest.raises(ValueError, match=r"must be False with dropout_p=0\.5, got True"),
    ):
        torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


def test_masks_that_no_cache_has_are_refused() -> None:
    q = draw(1, 5, 2, 16)
    with pytest.raises(ValueError, match="False with this mask, got True and <BlockMask documents"):
        flash_attn_func(q, q, q, mask=BlockMask.documents([0, 0, 1, 1, 1]), match_kvcache=True)
    out = flash_attn_func(q, q, q, mask=BlockMask.causal(), match_kvcache=True)
    assert torch.equal(out, flash_attn_func(q, q, q, causal=True, match_kvcache=True))


def test_a_ring_is_refused() -> None:
    q = draw(1, 4, 2, 16)
    with match_kvcache(), pytest.raises(FlashDistError, match="False around ring_attention"):
        flash_dist.ring_attention(q, q, q)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_what_is_no_bool_is_refused(function: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="match_kvcache must be True or False, got str"):
        function(match_kvcache="yes")


# --- Graphs, programs and transforms --------------------------------------------------------------


def matched(x: Tensor) -> Tensor:
    with match_kvcache():
        q, k, v = x.chunk(3, 2)
        out: Tensor = flash_attn_func(q, k, v, causal=True)
    return out


def results(function: Callable[[Tensor], Tensor]) -> Pair:
    x = draw(2, 9, 6, 16).requires_grad_()
    out = function(x)
    return out.detach(), torch.autograd.grad(out.square().sum(), x)[0]


def test_a_checkpoint_computes_the_same_again() -> None:
    def again(x: Tensor) -> Tensor:
        out: Tensor = checkpoint(matched, x, use_reentrant=False)
        return out

    assert_same(results(again), results(matched))


def test_transforms_take_it_along() -> None:
    q = draw(2, 3, 2, 16)
    with Calls() as calls:
        torch.func.grad(lambda x: flash_attn_func(x, q, q, match_kvcache=True).sum())(q)
        x = q.unsqueeze(0)
        torch.func.vmap(lambda x: flash_attn_func(x, x, x, match_kvcache=True))(x)
    assert calls.seen == [True, True]


@pytest.mark.slow
def test_a_compiled_function_has_the_same_bits() -> None:
    compiled: Any = torch.compile(matched, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled), results(matched))


@pytest.mark.slow
def test_another_choice_compiles_another_graph() -> None:
    x = draw(1, 9, 2, 16)

    def attend(x: Tensor) -> Any:  # noqa: ANN401
        return flash_attn_func(x, x, x)

    compiled = torch.compile(attend, fullgraph=True)
    for matches in (False, True, False):
        with match_kvcache(matches):
            assert torch.equal(compiled(x), flash_attn_func(x, x, x))


class Layer(torch.nn.Module):
    """A model that consists of one call of attention."""

    def forward(self, x: Tensor) -> Tensor:
        """Return attention with x as queries, keys and values."""
        return matched(x)


@pytest.mark.slow
def test_an_exported_program_keeps_it() -> None:
    x = draw(2, 9, 6, 16)
    exported = torch.export.export(Layer(), (x,)).module()
    assert_same(results(exported), results(matched))


@pytest.mark.slow
def test_the_operator_passes_opcheck_with_it() -> None:
    q = draw(1, 5, 2, 16).requires_grad_()
    call = (None, [0, -1, 0, 1], *NOT_PACKED, 0.25, False, 0.0, None, None, True)
    torch.library.opcheck(torch.ops.flash_dist.attention.default, (q, q, q, *call))
