"""The registered operators on the CPU: values, fake kernels, opcheck."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_dist import flash_attn_func
from flash_dist.kernels import operators
from flash_dist.kernels.problem import NOT_PACKED, Packing, Problem
from flash_dist.masks import Band, BlockMask

Tensor = torch.Tensor

CAUSAL = [0, -1, 0, 1]
SCALE = 0.25
BUDGET = 1 << 20
REGISTRATION = "test_autograd_registration"  # no other check: a backward refuses derivatives
FLAGS = (False,)  # keep or batch_invariant
IDS_Q = [0, 0, 1, 1, 2]
IDS_K = [0, 1, 1, 2, 2, 2, 3]


class Inputs(NamedTuple):
    """q, k, v, and the boundaries of packed documents."""

    q: Tensor
    k: Tensor
    v: Tensor
    packed: Packing | tuple[None, None, int, int] = NOT_PACKED


def draw(*shape: int) -> Tensor:
    return torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape))
    )


def starts(*lengths: int) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


STRIDED = draw(2, 4, 5, 16).transpose(1, 2), draw(2, 2, 7, 16).transpose(1, 2)
CALLS = [
    Inputs(draw(2, 5, 4, 16), draw(2, 7, 2, 16), draw(2, 7, 2, 16)),
    Inputs(draw(2, 5, 4, 16), draw(2, 7, 2, 16), draw(2, 7, 2, 8)),
    Inputs(draw(2, 5, 2, 2, 16), draw(2, 7, 2, 16), draw(2, 7, 2, 8)),
    Inputs(STRIDED[0], STRIDED[1], STRIDED[1]),
    Inputs(
        draw(9, 4, 16), draw(7, 2, 16), draw(7, 2, 8), Packing(starts(4, 5), starts(3, 4), 5, 4)
    ),
    Inputs(
        draw(9, 2, 2, 16), draw(7, 2, 16), draw(7, 2, 16), Packing(starts(0, 9), starts(5, 2), 9, 5)
    ),
]
IDS = ["4-D", "head_dim_v", "5-D", "strided", "packed", "packed-5-D"]
DENSE = [call for call in CALLS if call.packed is NOT_PACKED]


def opcheck(name: str, *arguments: object, **options: Any) -> None:  # noqa: ANN401
    torch.library.opcheck(getattr(torch.ops.flash_dist, name).default, arguments, **options)


def with_gradients(*tensors: Tensor) -> list[Tensor]:
    return [x.detach().clone(memory_format=torch.preserve_format).requires_grad_() for x in tensors]


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_the_operators_pass_opcheck_with_a_band(call: Inputs) -> None:
    q, k, v, packed = call
    out, lse = torch.ops.flash_dist.attention(q, k, v, None, CAUSAL, *packed, SCALE)
    opcheck("attention", q, k, v, None, CAUSAL, *packed, SCALE)
    opcheck("attention", *with_gradients(q, k, v), None, CAUSAL, *packed, SCALE)
    saved = torch.ones_like(out), q, k, v, out, lse
    rest = torch.ones_like(lse), None, None, CAUSAL, *packed, SCALE, BUDGET, False
    opcheck("attention_backward", *saved, *rest)
    opcheck("attention_backward", *with_gradients(*saved), *rest, test_utils=REGISTRATION)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_operators_without_a_formula_compute_what_those_with_one_do(call: Inputs) -> None:
    q, k, v, packed = call
    ops, numbers, last = torch.ops.flash_dist, torch.tensor(CAUSAL), (False, *packed)
    forward = numbers, None, SCALE, *last
    out, lse = ops.attention(q, k, v, None, CAUSAL, *packed, SCALE)
    assert all(map(torch.equal, ops.attention_no_grad(q, k, v, *forward), (out, lse)))
    opcheck("attention_no_grad", q, k, v, *forward)
    saved = torch.ones_like(out), q, k, v, out, lse, torch.ones_like(lse)
    backward = numbers, None, None, SCALE, BUDGET, False, *last
    want = ops.attention_backward(*saved, None, None, CAUSAL, *packed, SCALE, BUDGET, *FLAGS)[:3]
    assert all(map(torch.equal, ops.attention_backward_no_grad(*saved, *backward), want))
    opcheck("attention_backward_no_grad", *saved, *backward)


def test_an_operator_without_a_formula_says_so_where_gradients_pass() -> None:
    q, k, v, _ = CALLS[0]
    leaf = q.detach().requires_grad_()
    out, _ = torch.ops.flash_dist.attention_no_grad(leaf, k, v, torch.tensor(CAUSAL), None, SCALE)
    with pytest.warns(UserWarning, match="attention_no_grad: an autograd kernel was not regis"):
        torch.autograd.grad(out.sum(), leaf)


@pytest.mark.parametrize("call", DENSE, ids=IDS[: len(DENSE)])
def test_the_operators_pass_opcheck_with_a_block_mask(call: Inputs) -> None:
    q, k, v, _ = call
    mask = BlockMask.block_causal(IDS_Q, IDS_K)
    where = None, mask.handle, 1, 1, False, SCALE
    out, lse = torch.ops.flash_dist.attention_masked(q, k, v, *where, *FLAGS, *FLAGS)
    opcheck("attention_masked", q, k, v, *where, *FLAGS, *FLAGS)
    opcheck("attention_masked", *with_gradients(q, k, v), *where, *FLAGS, *FLAGS)
    saved = torch.ones_like(out), q, k, v, out, lse
    rest = None, *where, BUDGET, *FLAGS
    opcheck("attention_masked_backward", *saved, *rest)
    opcheck("attention_masked_backward", *with_gradients(*saved), *rest, test_utils=REGISTRATION)


@pytest.mark.parametrize("call", CALLS, ids=IDS)
def test_shapes_of_gpu_tensors_are_told_without_a_gpu(call: Inputs) -> None:
    q, k, v, packed = call
    out, lse = torch.ops.flash_dist.attention(q, k, v, None, CAUSAL, *packed, SCALE)
    with FakeTensorMode():
        fake_q, fake_k, fake_v = (
            torch.empty(x.shape, dtype=torch.bfloat16, device="cuda") for x in (q, k, v)
        )
        packing = None
        if isinstance(packed, Packing):
            fake_starts = torch.empty(3, dtype=torch.int32, device="cuda")
            packing = Packing(fake_starts, fake_starts, 9, 9)
        problem = Problem(Band(), SCALE, packing, budget=BUDGET)
        fake_out, fake_lse = operators.attend(fake_q, fake_k, fake_v, problem)
        saved = fake_q, fake_k, fake_v, fake_out, fake_lse
        *gradients, _ = operators.backward(fake_out, saved, None, problem)
    assert (fake_out.shape, fake_out.dtype) == (out.shape, torch.bfloat16)
    assert (fake_lse.shape, fake_lse.dtype) == (lse.shape, torch.float32)
    assert [x.shape for x in gradients] == [x.shape for x in (q, k, v)]
    assert all(x.is_contiguous() and x.device.type == "cuda" for x in (fake_out, *gradients))


def test_an_error_inside_the_binding_arrives_as_a_python_exception() -> None:
    q, k, v, packed = CALLS[0]
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)  # the wrong key for CPU tensors
    fwd = torch.ops.flash_dist.attention.default
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"q must be on a GPU, got float\d+ .* on cpu"):
            fwd.redispatch(cuda, q, k, v, None, CAUSAL, *packed, SCALE)


def test_a_fake_mask_makes_no_tensors() -> None:
    mask = BlockMask.documents([0, 0, 1])
    with FakeTensorMode():
        q = torch.empty(2, 3, 4, 64, dtype=torch.bfloat16, device="cuda")
        out, _ = operators.attend(q, q, q, Problem(mask, SCALE))
    assert (out.shape, out.device.type) == (q.shape, "cuda")


@pytest.mark.parametrize("call", DENSE, ids=IDS[: len(DENSE)])
def test_a_band_and_its_dense_mask_give_the_same(call: Inputs) -> None:
    q, k, v, _ = call
    rows, columns = torch.arange(q.shape[1]).unsqueeze(1), torch.arange(k.shape[1])
    seen = columns <= rows + k.shape[1] - q.shape[1]
    masks = BlockMask.causal(), BlockMask.from_dense(seen)
    assert (masks[0].band, masks[1].band) == (Band(right=0), None)
    results = []
    for mask in masks:
        problem = Problem(mask, SCALE, budget=BUDGET)
        out, lse = operators.attend(q, k, v, problem)
        *gradients, _ = operators.backward(torch.ones_like(out), (q, k, v, out, lse), None, problem)
        results.append((out, lse, *gradients))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_packed_documents_do_not_see_one_another() -> None:
    q, k, v, packed = CALLS[4]
    out, lse = torch.ops.flash_dist.attention(q, k, v, None, CAUSAL, *packed, SCALE)
    for queries, keys in ((slice(0, 4), slice(0, 3)), (slice(4, 9), slice(3, 7))):
        one = (x[i].unsqueeze(0) for x, i in ((q, queries), (k, keys), (v, keys)))
        own, own_lse = torch.ops.flash_dist.attention(*one, None, CAUSAL, *NOT_PACKED, SCALE)
        assert torch.equal(out[queries], own[0])
        assert torch.equal(lse[:, queries], own_lse[0])


def test_arrays_of_a_mask_are_refused_on_the_cpu() -> None:
    q, k, v, _ = CALLS[0]
    plan = BlockMask.block_causal(IDS_Q, IDS_K).plan(2, 4, 5, 7)
    with pytest.raises(ValueError, match=r"mask must be a band on the CPU, got one of kind 1"):
        torch.ops.flash_dist.attention(q, k, v, plan.packed, plan.layout, *NOT_PACKED, SCALE)


NO_MEMORY = "CUDA out of memory. flash_dist could not allocate 4096 bytes of workspace on GPU 0"


@pytest.mark.parametrize("kind", ["band", "mask"])
@pytest.mark.parametrize("step", ["attention", "attention_backward"])
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (NO_MEMORY, torch.OutOfMemoryError),
        (f"check_status, csrc/binding/attention.cpp:44, {NO_MEMORY}", torch.OutOfMemoryError),
        ("torch has no current stream", RuntimeError),
    ],
    ids=["memory", "memory-with-its-place", "other"],
)
def test_no_memory_for_a_call_is_torchs_own_error(
    monkeypatch: pytest.MonkeyPatch, kind: str, step: str, words: str, error: type[Exception]
) -> None:
    mask = BlockMask.causal() if kind == "band" else BlockMask.documents([0, 0, 1])
    q = draw(1, 3, 2, 16).requires_grad_()
    name = "_" + (step if kind == "band" else step.replace("attention", "attention_masked"))

    def fail(*_: object) -> None:
        raise RuntimeError(words)

    want = torch.autograd.grad(flash_attn_func(q, q, q, mask=mask).sum(), q)[0]
    with monkeypatch.context() as patch:
        if step == "attention":
            patch.setattr(operators, name, fail)
        with pytest.raises(error) as caught:  # noqa: PT012 - the forward may be what fails
            out = flash_attn_func(q, q, q, mask=mask)
            patch.setattr(operators, name, fail)
            out.sum().backward()
    assert type(caught.value) is error
    assert str(caught.value) == (NO_MEMORY if error is torch.OutOfMemoryError else words)
    again = torch.autograd.grad(flash_attn_func(q, q, q, mask=mask).sum(), q)[0]
    assert torch.equal(again, want)
