"""flash_attn_func on the CPU: values, gradients, layouts, torch.compile, autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from flash_dist import BlockMask, flash_attn_func
from flash_dist.errors import FlashDistError
from flash_dist.kernels.budget import BUDGET_NOW

Tensor = torch.Tensor
Quint = tuple[Tensor, ...]

HEAD_DIMS = {  # head_dim, head_dim_v
    "d8": (8, 8),
    "d64": (64, 64),
    "d80": (80, 80),
    "d128-v64": (128, 64),
    "d192-v128": (192, 128),
    "d256": (256, 256),
}
WINDOWS = {  # causal, window_size
    "full": (False, (-1, -1)),
    "causal": (True, (-1, -1)),
    "left": (False, (2, -1)),
    "both": (False, (1, 2)),
    "causal-left": (True, (3, 5)),
    "diagonal": (False, (0, 0)),
}
SEQLENS = {"square": (7, 7), "more-keys": (4, 9), "more-queries": (9, 4)}


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Compute torch's attention in our layout; a row that sees no key is zero there as well."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True)
    return out.transpose(1, 2).masked_fill(~seen.any(-1).view(1, -1, 1, 1), 0.0)


def seen_keys(seqlen_q: int, seqlen_k: int, left: int, right: int) -> Tensor:
    """Return booleans [seqlen_q, seqlen_k] by definition, aligned to the bottom right."""
    offset = seqlen_k - seqlen_q
    return torch.tensor(
        [
            [(left < 0 or j >= i + offset - left) and (right < 0 or j <= i + offset + right)
             for j in range(seqlen_k)]
            for i in range(seqlen_q)
        ]
    )  # fmt: skip


def run(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Quint:
    """Return out, lse, dq, dk and dv, for fixed gradients of out and lse."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, return_lse=True, **options)
    finite = torch.isfinite(lse)
    upstream = (
        draw(out.numel()).view(out.shape).to(out.dtype),
        draw(lse.numel()).view(lse.shape).to(lse.dtype)[finite],
    )
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse[finite]), leaves, upstream)


def assert_equal(got: Quint, want: Quint) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        assert torch.equal(a, b.reshape(a.shape)), name


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("seqlens", SEQLENS.values(), ids=SEQLENS.keys())
def test_out_and_gradients_are_those_of_torch(
    seqlens: tuple[int, int], window: tuple[bool, tuple[int, int]]
) -> None:
    seqlen_q, seqlen_k = seqlens
    causal, window_size = window
    q, k, v = draw(2, seqlen_q, 4, 16), draw(2, seqlen_k, 2, 16), draw(2, seqlen_k, 2, 8)
    seen = seen_keys(seqlen_q, seqlen_k, window_size[0], 0 if causal else window_size[1])
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attn_func(q, k, v, causal=causal, window_size=window_size)
    want = attend_by_torch(q, k, v, seen)
    torch.testing.assert_close(out, want)
    dout = draw(*out.shape)
    got_grads = torch.autograd.grad(out, leaves, dout)
    want_grads = torch.autograd.grad(want, leaves, dout)
    torch.testing.assert_close(got_grads, want_grads)


@pytest.mark.parametrize("head_dims", HEAD_DIMS.values(), ids=HEAD_DIMS.keys())
def test_gradients_pass_gradcheck_in_float64(head_dims: tuple[int, int]) -> None:
    head_dim, head_dim_v = head_dims
    q, k, v = draw(1, 4, 2, head_dim) / 8, draw(1, 5, 1, head_dim) / 8, draw(1, 5, 1, head_dim_v)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_func(q, k, v, causal=True, return_lse=True),
        inputs,
        fast_mode=True,
    )


def test_rows_without_a_key_are_zero_and_have_no_gradient() -> None:
    out, lse, dq, dk, dv = run(draw(1, 9, 2, 16), draw(1, 4, 2, 16), draw(1, 4, 2, 16), causal=True)
    assert (out[:, :5] == 0).all()
    assert (lse[:, :, :5] == -torch.inf).all()
    assert (dq[:, :5] == 0).all()
    assert all(torch.isfinite(x).all() for x in (out, dq, dk, dv))


def test_an_infinite_gradient_of_lse_stays_out_of_rows_without_a_key() -> None:
    leaves = draw(1, 9, 2, 16), draw(1, 4, 2, 16), draw(1, 4, 2, 16)
    for x in leaves:
        x.requires_grad_()
    _, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    got = torch.autograd.grad((lse * lse).sum(), leaves)
    _, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    seen = lse[:, :, 5:]
    want = torch.autograd.grad((seen * seen).sum(), leaves)
    assert all(map(torch.equal, got, want))
    assert (got[0][:, :5] == 0).all()


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    q, k, v = (draw(1, 5, 2, 64).requires_grad_() for _ in range(3))
    out = flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(FlashDistError, match="has first derivatives only, got a gradient of its"):
        dq.sum().backward()


def grouped(q: Tensor) -> dict[str, Tensor]:
    """Return q with axes of 2 kv heads and 3 queries instead of 6 heads, in several layouts."""
    five = q.unflatten(2, (2, 3))
    room = torch.full((*five.shape[:2], 5, 4, five.shape[4] + 8), torch.nan, dtype=q.dtype)
    odd = room[:, :, 1:3, :3, : five.shape[4]].copy_(five)
    swapped = five.transpose(2, 3).contiguous().transpose(2, 3)  # [.., groups, num_heads_kv, ..]
    return {"contiguous": five, "odd": odd, "swapped": swapped}


@pytest.mark.parametrize("order", ["contiguous", "odd", "swapped"])
def test_a_query_in_5_dimensions_gives_the_same_bits(order: str) -> None:
    q, k, v = draw(2, 7, 6, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 8)
    want = run(q, k, v, causal=True)
    got = run(grouped(q)[order], k, v, causal=True)
    assert got[0].shape == (2, 7, 2, 3, 8)
    assert_equal(got, want)


@pytest.mark.parametrize("size", [1, 3])
def test_expanded_keys_give_the_same_bits_and_their_gradient_is_summed_once(size: int) -> None:
    q, k, v = draw(2, 7, 6, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 8)
    want = run(q, k, v)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    wide_k, wide_v = (x.unsqueeze(3).expand(-1, -1, -1, size, -1) for x in (leaves[1], leaves[2]))
    out, lse = flash_attn_func(leaves[0].unflatten(2, (2, 3)), wide_k, wide_v, return_lse=True)
    upstream = (draw(out.numel()).view(out.shape), draw(lse.numel()).view(lse.shape))
    gradients = torch.autograd.grad((out, lse), leaves, upstream)
    assert_equal((out.detach(), lse.detach(), *gradients), want)


def make_mask() -> tuple[BlockMask, Tensor]:
    """Return a boolean mask without a pattern; its third query sees nothing."""
    seen = torch.rand(7, 9, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[2] = False
    return BlockMask.from_dense(seen), seen


def test_a_mask_decides_which_keys_are_seen() -> None:
    mask, seen = make_mask()
    q, k, v = draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16)
    out, lse, *gradients = run(q, k, v, mask=mask)
    torch.testing.assert_close(out, attend_by_torch(q, k, v, seen))
    assert (lse[:, :, 2] == -torch.inf).all()
    assert all(torch.isfinite(x).all() for x in gradients)


def test_masked_gradients_pass_gradcheck() -> None:
    mask, _ = make_mask()
    inputs = tuple(
        x.requires_grad_() for x in (draw(1, 7, 2, 8), draw(1, 9, 1, 8), draw(1, 9, 1, 8))
    )
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_func(q, k, v, mask=mask), inputs, fast_mode=True
    )


def test_a_mask_that_is_a_band_gives_the_bits_of_the_arguments() -> None:
    q, k, v = draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16)
    assert_equal(run(q, k, v, mask=BlockMask.causal()), run(q, k, v, causal=True))
    assert_equal(
        run(q, k, v, mask=BlockMask.sliding_window(2, 1)), run(q, k, v, window_size=(2, 1))
    )


def test_batch_invariance_can_be_asked_for() -> None:
    q, k, v = draw(3, 7, 4, 16), draw(3, 9, 2, 16), draw(3, 9, 2, 16)
    together = run(q, k, v, batch_invariant=True)
    torch.testing.assert_close(together, run(q, k, v))


@pytest.mark.parametrize("masked", [False, True], ids=["causal", "masked"])
def test_it_compiles_without_a_graph_break(*, masked: bool) -> None:
    q, k, v = draw(2, 7, 2, 3, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16)
    mask = make_mask()[0] if masked else None

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (x.unsqueeze(3).expand(-1, -1, -1, 3, -1) for x in (k, v))
        return flash_attn_func(q, k, v, mask=mask, causal=mask is None, return_lse=True)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = attention(*leaves)
    want = flash_attn_func(q, k, v, mask=mask, causal=mask is None)
    assert torch.equal(out, want)
    assert lse.shape == (2, 6, 7)
    got = torch.autograd.grad(out.sum(), leaves)
    assert all(map(torch.equal, got, torch.autograd.grad(want.sum(), leaves)))


def test_one_tensor_may_be_query_key_and_value_when_compiled() -> None:
    x = draw(1, 5, 2, 16).requires_grad_()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    out, want = compiled(x, x, x), flash_attn_func(x, x, x)
    assert torch.equal(out, want)
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x) for y in (out, want)))


def test_lengths_may_be_symbols() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=True)
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn_func(q, k, v, causal=True)

    for seqlen in (5, 9, 12):
        q, k, v = (draw(2, seqlen, 2, 16).requires_grad_() for _ in range(3))
        out = attention(q, k, v)
        assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
        out.sum().backward()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_scale_may_be_an_argument_when_compiled(*, dynamic: bool) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager", dynamic=dynamic)
    def attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return flash_attn_func(q, k, v, softmax_scale=scale)

    q, k, v = (draw(2, 5, 2, 16).requires_grad_() for _ in range(3))
    for scale in (0.5, 0.25, 2.0):
        out = attention(q, k, v, scale)
        assert torch.equal(out, flash_attn_func(q, k, v, softmax_scale=scale))
        out.sum().backward()


def backward(out: Tensor, *leaves: Tensor) -> Quint:
    out.sum().backward()
    return tuple(leaf.grad for leaf in leaves if leaf.grad is not None)


@pytest.mark.parametrize("reentrant", [False, True], ids=["hooks", "reentrant"])
def test_checkpointing_gives_the_same_bits(*, reentrant: bool) -> None:
    mask, _ = make_mask()
    q, k, v = (
        x.requires_grad_() for x in (draw(2, 7, 4, 16), draw(2, 9, 2, 16), draw(2, 9, 2, 16))
    )
    want = torch.autograd.grad(flash_attn_func(q, k, v, mask=mask).sum(), (q, k, v))
    out = checkpoint(
        lambda q, k, v: flash_attn_func(q, k, v, mask=mask), q, k, v, use_reentrant=reentrant
    )
    assert all(map(torch.equal, backward(out, q, k, v), want))


def test_what_is_saved_goes_through_the_hooks_of_saved_tensors() -> None:
    q, k, v = (draw(1, 5, 2, 16).requires_grad_() for _ in range(3))
    packed: list[Tensor] = []

    def pack(x: Tensor) -> int:
        packed.append(x)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        out = flash_attn_func(q, k, v)
    assert [tuple(x.shape) for x in packed] == [(1, 5, 2, 16)] * 4 + [(1, 2, 5)]
    out.sum().backward()


def test_autocast_casts_float32_inputs_and_the_gradients_come_back_in_float32() -> None:
    q, k, v = (draw(1, 20, 2, 64, dtype=torch.float32) for _ in range(3))
    want = run(*(x.bfloat16() for x in (q, k, v)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run(q, k, v)
    assert got[0].dtype == torch.bfloat16
    assert all(gradient.dtype == torch.float32 for gradient in got[2:])
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
def test_autocast_does_the_same_when_compiled(*, inside: bool) -> None:
    q, k, v = (draw(1, 20, 2, 64, dtype=torch.float32).requires_grad_() for _ in range(3))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            return flash_attn_func(q, k, v)

    call = attention if inside else flash_attn_func
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = compiled(q, k, v), flash_attn_func(q, k, v)
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, want)
        got = torch.autograd.grad(out.float().sum(), (q, k, v))
    assert all(map(torch.equal, got, torch.autograd.grad(want.float().sum(), (q, k, v))))


def test_autocast_leaves_float64_alone() -> None:
    q, k, v = (draw(1, 5, 2, 16) for _ in range(3))
    want = run(q, k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_equal(run(q, k, v), want)


def test_shapes_of_gpu_tensors_are_told_without_a_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 9, 2, 2, 72, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 7, 2, 72, dtype=torch.bfloat16, device="cuda")
        v = torch.empty(2, 7, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = flash_attn_func(q, k, v, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == ((2, 9, 2, 2, 64), q.dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = (draw(1, 20, 2, 64).bfloat16() for _ in range(3))
    exact = flash_attn_func(q.double(), k.double(), v.double())
    out = flash_attn_func(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=2**-9)


def test_a_compiled_function_reads_the_workspace_limit_when_its_backward_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budgets: list[int] = []

    def keep(module: torch.fx.GraphModule, _: object) -> Any:  # noqa: ANN401 - of functorch
        called = (node for node in module.graph.nodes if "backward" in str(node.target))
        budgets.extend(node.args[-2] for node in called)
        return make_boxed_func(module.forward)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend)
    for megabytes in (None, "200", "300"):
        if megabytes is not None:
            monkeypatch.setenv("FLASH_DIST_WORKSPACE_MB", megabytes)
        q, k, v = (draw(1, 5, 2, 16).requires_grad_() for _ in range(3))
        compiled(q, k, v).sum().backward()
    assert budgets == [BUDGET_NOW]  # a single graph, without a fixed budget
