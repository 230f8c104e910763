"""The public function on the CPU: values, gradients, torch.compile, errors."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dist import flash_attn_func


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_gradients_pass_gradcheck_in_float64(*, causal: bool) -> None:
    q, k, v = draw(1, 4, 2, 64) / 8, draw(1, 5, 1, 64) / 8, draw(1, 5, 1, 64)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(
        lambda q, k, v: flash_attn_func(q, k, v, causal=causal, return_lse=True),
        inputs,
        fast_mode=True,
    )


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    q, k, v = (draw(1, 5, 2, 64).requires_grad_() for _ in range(3))
    out = flash_attn_func(q, k, v)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


def test_it_compiles_without_a_graph_break() -> None:
    q, k, v = (draw(1, 9, 2, 64).requires_grad_() for _ in range(3))
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    out = compiled(q, k, v, causal=True)
    assert torch.equal(out, flash_attn_func(q, k, v, causal=True))
    out.sum().backward()


def test_shapes_of_gpu_tensors_are_told_without_a_gpu() -> None:
    with FakeTensorMode():
        q = torch.empty(2, 9, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 7, 2, 64, dtype=torch.bfloat16, device="cuda")
        out, lse = flash_attn_func(q, k, k, return_lse=True)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, q.dtype, "cuda")
    assert (lse.shape, lse.dtype) == ((2, 4, 9), torch.float32)


def test_operators_pass_opcheck() -> None:
    q, k, v = draw(2, 9, 4, 64), draw(2, 7, 2, 64), draw(2, 7, 2, 64)
    out, lse = torch.ops.flash_dist.fwd(q, k, v, 0.125, True)  # noqa: FBT003
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(
        torch.ops.flash_dist.fwd.default, (q, k, v, 0.125, True), test_utils=tests
    )
    arguments = (out, q, k, v, out, lse, None, 0.125, True, 0)
    torch.library.opcheck(torch.ops.flash_dist.bwd.default, arguments, test_utils=tests)


def test_half_precision_is_computed_in_float32() -> None:
    q, k, v = (draw(1, 20, 2, 64).bfloat16() for _ in range(3))
    exact = flash_attn_func(q.double(), k.double(), v.double())
    out = flash_attn_func(q, k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, exact.bfloat16(), rtol=2**-7, atol=2**-9)


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        (
            ((1, 8, 2, 80),) * 3,
            ValueError,
            r"head_dim must be 64 or 128, got 80 \(q has shape \[1, 8, 2, 80\]\)",
        ),
        (((8, 2, 64),) * 3, ValueError, "q must have 4 dimensions"),
        (
            ((1, 8, 3, 64), (1, 8, 2, 64), (1, 8, 2, 64)),
            ValueError,
            "num_heads_kv must divide num_heads_q, got 2",
        ),
        (
            ((1, 8, 2, 64), (1, 8, 2, 64), (1, 9, 2, 64)),
            ValueError,
            "k and v must have the same shape",
        ),
        (
            ((1, 8, 2, 64), (2, 8, 2, 64), (2, 8, 2, 64)),
            ValueError,
            "must agree in batch and head_dim",
        ),
        (((1, 0, 2, 64),) * 3, ValueError, "no dimension of q may be 0"),
    ],
    ids=["head_dim", "dims", "heads", "kv-shapes", "batch", "empty"],
)
def test_wrong_shapes_are_refused_in_words(
    shapes: tuple[tuple[int, ...], ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        flash_attn_func(*(draw(*shape) for shape in shapes))


def test_wrong_types_are_refused_in_words() -> None:
    q = draw(1, 8, 2, 64)
    with pytest.raises(TypeError, match=r"q must be a torch\.Tensor, got list"):
        flash_attn_func([1.0], q, q)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="float64 on cpu, got int32"):
        flash_attn_func(q.int(), q.int(), q.int())
    with pytest.raises(TypeError, match="q and k must have the same dtype"):
        flash_attn_func(q, q.float(), q)
    with pytest.raises(ValueError, match=r"softmax_scale must be positive and finite, got -1\.0"):
        flash_attn_func(q, q, q, softmax_scale=-1)


def test_a_budget_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_DIST_WORKSPACE_MB", "much")
    q = draw(1, 8, 2, 64)
    with pytest.raises(
        Exception, match="FLASH_DIST_WORKSPACE_MB must be a whole number of MiB, got `much`"
    ):
        flash_attn_func(q, q, q)
