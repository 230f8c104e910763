"""Queries with a heads_per_kv axis, strides and expanded keys: equal bits, no copies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist import flash_attn_func, flash_attn_varlen_func
from tests.gpu.packed import boundaries, pack
from tests.gpu.running import attend, check, peak_of
from tests.masks import masked_problem
from tests.reference import Problem, assert_same_bits, random_problem

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Views = tuple[Tensor, Tensor, Tensor]


def grouped(problem: Problem) -> Problem:
    """Return the problem with q and dout [batch, seqlen, num_heads_kv, heads_per_kv, head_dim]."""
    shape = (problem.k.shape[2], -1)
    return replace(problem, q=problem.q.unflatten(2, shape), dout=problem.dout.unflatten(2, shape))


def other_order(problem: Problem) -> Problem:
    """Return views of memory stored as [batch, seqlen, heads_per_kv, num_heads_kv, head_dim]."""
    five = grouped(problem)
    return replace(
        five,
        q=five.q.transpose(2, 3).contiguous().transpose(2, 3),
        dout=five.dout.transpose(2, 3).contiguous().transpose(2, 3),
    )


def expanded(problem: Problem) -> Problem:
    """Return the problem with a heads_per_kv axis of stride 0 in k and v."""
    five = grouped(problem)
    shape = (-1, -1, -1, five.q.shape[3], -1)
    return replace(five, k=five.k.unsqueeze(3).expand(shape), v=five.v.unsqueeze(3).expand(shape))


def heads_first(problem: Problem) -> Problem:
    """Return tensors that are stored as [batch, num_heads, seqlen, head_dim]."""
    tensors = (problem.q, problem.k, problem.v, problem.dout)
    q, k, v, dout = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors)
    return replace(problem, q=q, k=k, v=v, dout=dout)


def packed_in_one(problem: Problem) -> Problem:
    """Return views of [batch, seqlen, num_heads_q + 2 * num_heads_kv, head_dim], with k first."""
    heads, dim_v = problem.k.shape[2], problem.v.shape[-1]
    v = torch.nn.functional.pad(problem.v, (0, problem.q.shape[-1] - dim_v))
    together = torch.cat((problem.k, problem.q, v), dim=2)
    return replace(
        problem,
        q=together[:, :, heads:-heads],
        k=together[:, :, :heads],
        v=together[:, :, -heads:, :dim_v],
    )


def with_gaps(problem: Problem) -> Problem:
    """Return views with five axes, cut out of tensors of NaN that are larger on each axis."""

    def spread(x: Tensor) -> Tensor:
        gaps = (1, 3, *range(1, x.dim() - 2), 8)
        room = [size + 2 * gap for size, gap in zip(x.shape, gaps, strict=True)]
        wide = torch.full(room, torch.nan, dtype=x.dtype, device=x.device)
        for axis, (size, gap) in enumerate(zip(x.shape, gaps, strict=True)):
            wide = wide.narrow(axis, gap, size)
        return wide.copy_(x)

    five = grouped(problem)
    return replace(
        five, q=spread(five.q), k=spread(five.k), v=spread(five.v), dout=spread(five.dout)
    )


LAYOUTS: dict[str, Callable[[Problem], Problem]] = {
    "heads-per-kv": grouped,
    "other-order-of-axes": other_order,
    "expanded-keys": expanded,
    "heads-first": heads_first,
    "one-tensor": packed_in_one,
    "gaps": with_gaps,
}


def flat_gradients(result: dict[str, Tensor], problem: Problem) -> dict[str, Tensor]:
    """Return the results for q, k, v with four axes; sum gradients over expanded axes."""
    shapes = {
        "out": (*problem.q.shape[:-1], problem.v.shape[-1]),
        "dq": problem.q.shape,
        "dk": problem.k.shape,
        "dv": problem.v.shape,
    }
    flat = {"lse": result["lse"]}
    for name, shape in shapes.items():
        x = result[name]
        if x.dim() == 5 and name in {"dk", "dv"}:
            assert (x[:, :, :, 1:] == 0).all()
            x = x[:, :, :, 0]
        flat[name] = x.reshape(shape)
    return flat


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["causal", "dense-per-head"])
def test_a_layout_does_not_change_a_bit(
    name: str,
    layout: Callable[[Problem], Problem],
    head_dims: tuple[int, int],
    half: torch.dtype,
) -> None:
    problem = masked_problem(
        name,
        batch=2,
        seqlen_q=131,
        seqlen_k=131,
        num_heads=6,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
    )
    changed = layout(problem)
    result = flat_gradients(attend(changed), problem)
    assert_same_bits(attend(problem), result, "a layout")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_of_float32_does_not_change_a_bit(
    layout: Callable[[Problem], Problem], single: torch.dtype
) -> None:
    problem = random_problem(
        batch=2, seqlen_q=131, num_heads=6, num_heads_kv=2, head_dim=72, dtype=single
    )
    result = flat_gradients(attend(layout(problem)), problem)
    assert_same_bits(attend(problem), result, "a layout")


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
def test_the_rows_of_a_tensor_may_all_be_the_same_memory(
    name: str, head_dims: tuple[int, int], half: torch.dtype
) -> None:
    """Such rows have no tensor map, so they are copied: the bits are those of a copy."""
    problem = random_problem(
        batch=2,
        seqlen_q=200,
        num_heads=4,
        num_heads_kv=2,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
        causal=True,
    )
    x: Tensor = getattr(problem, name)
    one = x[:, :1].expand(x.shape)
    expanded_rows: dict[str, Any] = {name: one}
    copied: dict[str, Any] = {name: one.contiguous()}
    changed = replace(problem, **expanded_rows)
    check([changed])
    assert_same_bits(attend(changed), attend(replace(problem, **copied)), name)


def test_a_sum_over_the_queries_has_the_gradients_of_its_copy(
    head_dims: tuple[int, int], half: torch.dtype
) -> None:
    problem = random_problem(
        batch=2,
        seqlen_q=200,
        num_heads=4,
        head_dim=head_dims[0],
        head_dim_v=head_dims[1],
        dtype=half,
        causal=True,
    )

    def differentiate(dout: Tensor | None) -> dict[str, Tensor]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v)]
        out = flash_attn_func(q, k, v, causal=True)
        if dout is None:
            out.sum(1).backward(torch.ones_like(out[:, 0]))
        else:
            out.backward(dout)
        grads = [x.grad for x in leaves if x.grad is not None]
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    ones = torch.ones_like(problem.dout)
    assert_same_bits(differentiate(None), differentiate(ones), "a sum and its copy")


def scattered(x: Tensor) -> Tensor:
    """Return x stored with the last axis first."""
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def shifted(x: Tensor) -> Tensor:
    """Return contiguous x that starts an element after a multiple of 16 bytes."""
    room = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return room[1:].view(x.shape).copy_(x)


def padded(x: Tensor) -> Tensor:
    """Return x with rows that begin at odd elements."""
    return torch.nn.functional.pad(x, (0, 1))[..., :-1]


def every_other(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, dim=-1)[..., ::2]


GRADIENTS = {"scattered": scattered, "shifted": shifted, "padded": padded, "strided": every_other}


@pytest.mark.parametrize("layout", GRADIENTS.values(), ids=GRADIENTS.keys())
def test_autograd_may_hand_over_gradients_in_any_layout(
    layout: Callable[[Tensor], Tensor], half: torch.dtype
) -> None:
    problem = random_problem(num_heads=4, num_heads_kv=2, seqlen_q=70, dtype=half, causal=True)
    lse = attend(problem)["lse"]
    problem = replace(problem, dlse=torch.randn_like(lse))
    assert problem.dlse is not None
    changed = replace(problem, dout=layout(problem.dout), dlse=layout(problem.dlse))
    assert_same_bits(attend(problem), attend(changed), "contiguous and not")

    def by_hand(given: Problem) -> dict[str, Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in (given.q, given.k, given.v))
        outputs = torch.ops.flash_dist.attention(
            q, k, v, None, [0, -1, 0, 1], None, None, 0, 0, given.scale
        )
        grads = torch.autograd.grad(outputs, (q, k, v), (given.dout, given.dlse))
        return dict(zip(("dq", "dk", "dv"), grads, strict=True))

    assert_same_bits(by_hand(problem), by_hand(changed), "contiguous and not, by hand")


def test_autograd_may_hand_over_expanded_gradients(half: torch.dtype) -> None:
    problem = random_problem(num_heads=4, num_heads_kv=2, seqlen_q=70, dtype=half)
    lse = attend(problem)["lse"]
    one = torch.ones((), dtype=half, device=lse.device)
    wide = one.expand(problem.dout.shape), one.float().expand(lse.shape)
    results = []
    for dout, dlse in (wide, tuple(x.contiguous() for x in wide)):
        results.append(attend(replace(problem, dout=dout, dlse=dlse)))
    assert_same_bits(results[0], results[1], "expanded and contiguous")


@pytest.mark.gpu
def test_a_compiled_backward_may_hand_over_a_slice(half: torch.dtype) -> None:
    """The gradient of a `cat` is a slice that starts where the first part ends, here at 2 bytes."""
    problem = random_problem(num_heads=2, seqlen_q=70, dtype=half)
    weight = torch.randn(problem.dout.numel() + 1, device=problem.q.device, dtype=half)

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = flash_attn_func(q, k, v, causal=True)
        return (torch.cat((q.flatten()[:1], out.flatten())) * weight).sum()

    results = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
        grads = torch.autograd.grad(function(q, k, v), (q, k, v))
        results.append(dict(zip(("dq", "dk", "dv"), grads, strict=True)))
    assert_same_bits(results[0], results[1], "eager and compiled")


def test_gradients_reach_what_keys_were_expanded_from(half: torch.dtype) -> None:
    problem = random_problem(
        batch=2, seqlen_q=131, num_heads=6, num_heads_kv=2, dtype=half, causal=True
    )
    five = grouped(problem)
    q, k, v = (x.detach().requires_grad_() for x in (five.q, problem.k, problem.v))
    wide_k, wide_v = (x.unsqueeze(3).expand(-1, -1, -1, 3, -1) for x in (k, v))
    out = flash_attn_func(q, wide_k, wide_v, causal=True)
    grads = torch.autograd.grad(out, (q, k, v), five.dout)
    want = attend(problem)
    for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
        assert torch.equal(grad.reshape(want[name].shape), want[name]), name


class Cost:
    """Peak of the bytes that a call allocates, and the kernels that it launches."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.bytes = peak_of(call)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            call()
            torch.cuda.synchronize()
        self.kernels = sorted(
            event.name for event in profile.events() if "CUDA" in str(event.device_type)
        )


def forward_and_backward(problem: Problem) -> tuple[Cost, Cost]:
    """Return the cost of forward and backward, without autograd's own work on views."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ANN401 - without lse a tensor
        return flash_attn_func(q, k, v, **problem.options)

    out = attend(q, k, v)
    forward = Cost(lambda: attend(problem.q, problem.k, problem.v))
    backward = Cost(lambda: torch.autograd.grad(out, (q, k, v), problem.dout, retain_graph=True))
    return forward, backward


def check_that_ours_alone_run(forward: Cost, backward: Cost, problem: Problem) -> None:
    """Raise unless all kernels are ours, and the forward kernel allocates its results.

    The semaphores by which blocks add in order are set to 0 before a kernel that uses them.
    """
    assert len(forward.kernels) == 1, forward.kernels
    launched = [name for name in backward.kernels if not name.startswith("Memset")]
    assert len(backward.kernels) - len(launched) <= 1, backward.kernels
    for kernel in (*forward.kernels, *launched):
        assert "flash_dist" in kernel, kernel
    lse = 4 * problem.q[..., 0].numel()
    assert forward.bytes == problem.dout.nbytes + lse, "forward allocates more than out and lse"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "dense-per-head"])
@pytest.mark.parametrize("head_dim", [72, 256])
def test_nothing_is_copied(head_dim: int, name: str, dtype: torch.dtype) -> None:
    problem = masked_problem(
        name,
        batch=2,
        seqlen_q=512,
        num_heads=8,
        num_heads_kv=2,
        head_dim=head_dim,
        dtype=dtype,
    )
    plain = forward_and_backward(problem)
    check_that_ours_alone_run(*plain, problem)
    for layout in ("heads-per-kv", "other-order-of-axes", "heads-first", "one-tensor", "gaps"):
        changed = forward_and_backward(LAYOUTS[layout](problem))
        for what, before, after in zip(("forward", "backward"), plain, changed, strict=True):
            assert after.kernels == before.kernels, f"{layout} {what}"
            assert after.bytes == before.bytes, f"{layout} {what}"
    forward = forward_and_backward(expanded(problem))[0]
    assert forward.kernels == plain[0].kernels
    assert forward.bytes == plain[0].bytes


@pytest.mark.gpu
@pytest.mark.parametrize("groups", [False, True], ids=["four-axes", "heads-per-kv"])
def test_nothing_of_packed_documents_is_copied(groups: bool, half: torch.dtype) -> None:  # noqa: FBT001
    packed = pack((200, 0, 333, 64), num_heads=8, num_heads_kv=2, dtype=half)
    problem = grouped(packed.problem) if groups else packed.problem
    given = boundaries(packed, problem.q.device)
    q, k, v = (x[0].detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    dout = problem.dout[0]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:  # noqa: ANN401 - without lse a tensor
        return flash_attn_varlen_func(q, k, v, **given, causal=True)

    out = attend(q, k, v)
    forward = Cost(lambda: attend(q.detach(), k.detach(), v.detach()))
    backward = Cost(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    check_that_ours_alone_run(forward, backward, problem)


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(36, 36), (73, 73), (100, 82), (255, 3)])
@pytest.mark.parametrize("kind", [torch.float16, torch.float32], ids=str)
def test_head_dims_that_are_padded_have_the_bits_of_zeros(
    head_dim: int, head_dim_v: int, kind: torch.dtype
) -> None:
    sizes = (4, head_dim), (2, head_dim), (2, head_dim_v)
    leaves = [torch.randn(2, 77, *size, device="cuda", dtype=kind) for size in sizes]
    tensors = [x.mT.contiguous().mT.requires_grad_() for x in leaves]
    wide = [torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)).requires_grad_() for x in leaves]
    (q, k, v), (wide_q, wide_k, wide_v) = tensors, wide
    out = flash_attn_func(q, k, v, causal=True)
    scale = head_dim**-0.5
    wanted = flash_attn_func(wide_q, wide_k, wide_v, causal=True, softmax_scale=scale)
    assert torch.equal(out, wanted[..., :head_dim_v])
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, tensors, dout)
    more = torch.autograd.grad(wanted, wide, torch.nn.functional.pad(dout, (0, -head_dim_v % 8)))
    for got, other in zip(grads, more, strict=True):
        assert torch.equal(got, other[..., : got.shape[-1]])
