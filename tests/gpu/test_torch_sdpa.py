"""torch's own attention on our kernels, and `flash_dist.sdpa()`, have our functions' bits."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn import attention, functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import flash_dist
from flash_dist import flash_attn_func, flash_attn_varlen_func, last_variant
from flash_dist.integrations import torch_sdpa
from tests.reference import assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.gpu

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
Layer = Any  # a function of query, key and value

FLASH = SDPBackend.FLASH_ATTENTION


@pytest.fixture(autouse=True)
def provider() -> Iterator[None]:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("torch has no flash backend for this GPU")
    torch_sdpa.activate(varlen_first=True)  # otherwise torch 2.14 and newer would use cuDNN
    yield
    torch_sdpa.deactivate()


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)  # warn_only would not exclude cuDNN
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)


def draw(
    *, seqlen: int = 300, heads_kv: int = 4, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16
) -> Triple:
    """Return transposed views [batch, num_heads, seqlen, head_dim] of query, key and value."""
    q, k, v = (
        torch.randn(2, seqlen, heads, head_dim, device="cuda").to(dtype).transpose(1, 2)
        for heads in (4, heads_kv, heads_kv)
    )
    return q, k, v


def leaves(tensors: Triple) -> Triple:
    q, k, v = (x.detach().requires_grad_() for x in tensors)
    return q, k, v


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert_same_bits(got, want, "through torch's function and through ours")


def run(layer: Layer, tensors: Triple, dout: Tensor) -> dict[str, Tensor]:
    inputs = leaves(tensors)
    out = layer(*inputs)
    grads = torch.autograd.grad(out, inputs, dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def run_ours(tensors: Triple, dout: Tensor, **options: Any) -> dict[str, Tensor]:  # noqa: ANN401
    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out: Tensor = flash_attn_func(q, k, v, **options)
        return out.transpose(1, 2)

    return run(layer, tensors, dout)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads-last": lambda x: x,
    "heads-first": torch.Tensor.contiguous,
    "slices": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
}


@pytest.mark.parametrize("lay", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_sdpa_has_the_bits_of_our_function_and_the_strides_of_torch(
    lay: Callable[[Tensor], Tensor],
    is_causal: bool,  # noqa: FBT001 - of pytest
    half: torch.dtype,
) -> None:
    q, k, v = (lay(x) for x in draw(dtype=half))
    dout = torch.randn_like(q)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2)

    with sdpa_kernel(FLASH):
        got = run(layer, (q, k, v), dout)
        torch_sdpa.deactivate()
        own = run(layer, (q, k, v), dout)
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(layer, (q.double(), k.double(), v.double()), dout.double())
    want = run_ours((q, k, v), dout, causal=is_causal, softmax_scale=0.2)
    same(got, want)
    assert {name: x.stride() for name, x in got.items()} == {
        name: x.stride() for name, x in own.items()
    }
    for name, x in got.items():
        error, theirs = ((y - exact[name]).abs().max() for y in (x, own[name]))
        assert error <= 3 * theirs, (name, error, theirs)


def test_tensors_that_are_not_aligned_are_copied(half: torch.dtype) -> None:
    """torch's own kernel faults on such tensors."""
    q, k, v = draw(dtype=half)
    dout = torch.randn_like(q)
    q1, k1, v1 = (torch.cat([x[..., :1], x], -1)[..., 1:] for x in (q, k, v))
    with sdpa_kernel(FLASH):
        got = run(functional.scaled_dot_product_attention, (q1, k1, v1), dout)
    same(got, run_ours((q, k, v), dout))


def test_head_dims_that_are_no_multiple_of_8_are_padded_by_torch(half: torch.dtype) -> None:
    tensors = draw(head_dim=50, dtype=half)
    with sdpa_kernel(FLASH):
        got = functional.scaled_dot_product_attention(*tensors)
    wide = [functional.pad(x, (0, 6)).transpose(1, 2) for x in tensors]
    q, k, v = wide
    want = flash_attn_func(q, k, v, softmax_scale=50**-0.5)[..., :50]
    same({"out": got.transpose(1, 2)}, {"out": want})


def test_groups_of_heads_and_autocast_are_served() -> None:
    q, k, v = (x.float() for x in draw(heads_kv=2))
    with sdpa_kernel(FLASH), torch.autocast("cuda", dtype=torch.bfloat16):
        got = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    q, k, v = (x.bfloat16().transpose(1, 2) for x in (q, k, v))
    same({"out": got.transpose(1, 2)}, {"out": flash_attn_func(q, k, v)})


def test_torchs_selector_comes_here_in_deterministic_mode() -> None:
    tensors = draw()
    dout = torch.randn_like(tensors[0])
    with deterministic():
        assert torch_sdpa.status().first[0] == "flash_attention"
        runs = [run(functional.scaled_dot_product_attention, tensors, dout) for _ in range(3)]
    want = run_ours(tensors, dout)
    for got in runs:
        same(got, want)


def test_the_status_says_what_the_selector_does() -> None:
    status = torch_sdpa.status()
    assert status
    with sdpa_kernel(FLASH):
        assert torch_sdpa.status().first[0] == "flash_attention"
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        assert "efficient on GPU 0" in str(torch_sdpa.status())


def test_torchs_kernels_come_back() -> None:
    tensors = draw()
    with sdpa_kernel(FLASH):
        ours = functional.scaled_dot_product_attention(*tensors)
        torch_sdpa.deactivate()
        assert attention.current_flash_attention_impl() is None
        own = functional.scaled_dot_product_attention(*tensors)
        torch_sdpa.activate()
        again = functional.scaled_dot_product_attention(*tensors)
    assert not torch.equal(ours, own)  # other rounding
    same({"out": again}, {"out": ours})


def test_dropout_is_torchs_own() -> None:
    tensors = draw()
    dout = torch.randn_like(tensors[0])

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch.manual_seed(7)
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    with sdpa_kernel(FLASH), deterministic():
        got = run(layer, tensors, dout)
        torch_sdpa.deactivate()
        want = run(layer, tensors, dout)
    same(got, want)


@pytest.mark.parametrize(
    "lay", [LAYOUTS["heads-last"], LAYOUTS["heads-first"]], ids=["last", "first"]
)
def test_compiled_layers_have_the_same_bits(lay: Callable[[Tensor], Tensor]) -> None:
    q, k, v = (lay(x) for x in draw())
    dout = torch.randn(2, 300, 256, device="cuda").bfloat16()

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).flatten(2) * 2

    with sdpa_kernel(FLASH):
        got = run(torch.compile(layer, fullgraph=True), (q, k, v), dout)
        want = run(layer, (q, k, v), dout)
    same(got, want)


def test_a_cuda_graph_replays_the_same_bits() -> None:
    tensors = draw()
    with sdpa_kernel(FLASH):
        want = functional.scaled_dot_product_attention(*tensors)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = functional.scaled_dot_product_attention(*tensors)
        out.zero_()
        graph.replay()
    same({"out": out}, {"out": want})


@pytest.mark.skipif(
    "block_table" not in str(torch.ops.aten._flash_attention_forward.default._schema),
    reason="this torch reads no keys in pages",
)
def test_varlen_attn_reads_pages_to_the_bits_of_our_function() -> None:
    q = torch.randn(33, 4, 64, device="cuda").half()
    k, v = (torch.randn(40, 64, 2, 64, device="cuda").half() for _ in range(2))
    ends, used = (
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ((0, 1, 33), (1200, 640))
    )
    table = torch.randperm(40, device="cuda").to(torch.int32).reshape(2, 20)
    pages: dict[str, Any] = {"block_table": table, "seqused_k": used}
    out: Any = varlen_attn(
        q, k, v, ends, None, 32, 1280, window_size=(-1, 0), enable_gqa=True, **pages
    )
    want = flash_attn_varlen_func(
        q, k, v, ends, None, 32, 1280, causal=True, block_table=table, seqused_k=used
    )
    same({"out": out}, {"out": want})


def test_varlen_attn_comes_here_on_request_and_in_deterministic_mode() -> None:
    gpus = torch.cuda.device_count()
    assert torch_sdpa.status().varlen == ("flash_attention",) * gpus
    torch_sdpa.activate()
    with deterministic():
        assert torch_sdpa.status().varlen == ("flash_attention",) * gpus
        test_varlen_attn_has_the_bits_of_our_function((-1, -1))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (64, 0), (8, 2), (1025, 1025)], ids=str)
def test_varlen_attn_has_the_bits_of_our_function(window: tuple[int, int]) -> None:
    q, k, v = (torch.randn(400, 4, 64, device="cuda").half() for _ in range(3))
    bounds = torch.tensor([0, 129, 129, 400], dtype=torch.int32, device="cuda")
    packing = bounds, bounds, 271, 271
    dout = torch.randn_like(q)
    got = run(lambda q, k, v: varlen_attn(q, k, v, *packing, window_size=window), (q, k, v), dout)
    want = run(
        lambda q, k, v: flash_attn_varlen_func(q, k, v, *packing, window_size=window),
        (q, k, v),
        dout,
    )
    same(got, want)


def test_nested_tensors_are_packed_sequences() -> None:
    lengths = (129, 60)
    rows = [torch.randn(n, 4, 64, device="cuda").half() for n in lengths]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with sdpa_kernel(FLASH):
        out = functional.scaled_dot_product_attention(nested, nested, nested)
    for got, x in zip(out.unbind(), rows, strict=True):
        want = flash_attn_func(x[None], x[None], x[None])[0]
        same({"out": got.transpose(0, 1)}, {"out": want})


def test_multihead_attention_with_padded_keys_is_served_by_the_context() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda")
    x = torch.randn(3, 150, 256, device="cuda")
    padding = torch.arange(150, device="cuda") >= torch.tensor([[150], [97], [1]], device="cuda")
    with flash_dist.sdpa():
        got, _ = layer(x, x, x, key_padding_mask=padding, need_weights=False)
        got.sum().backward()
    assert "fp32" in last_variant()["bwd_dkdv"]["symbol"]
    exact = copy.deepcopy(layer).double()
    want, _ = exact(
        x.double(), x.double(), x.double(), key_padding_mask=padding, need_weights=False
    )
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-5)


def test_masks_and_float32_are_served_by_the_context(dtype: torch.dtype) -> None:
    tensors = draw(dtype=dtype)
    mask = torch.rand(2, 1, 300, 300, device="cuda") < 0.5
    added = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    dout = torch.randn_like(tensors[0])
    want = run(
        lambda q, k, v: flash_dist.scaled_dot_product_attention(q, k, v, mask), tensors, dout
    )
    for given in (mask, added):
        with flash_dist.sdpa():
            got = run(
                lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, given),  # noqa: B023 - called here
                tensors,
                dout,
            )
        same(got, want)
