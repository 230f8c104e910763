"""Gradients of the operators themselves: direct calls, exported programs, packages."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from flash_dist import (
    BlockMask,
    IntervalMask,
    flash_attn_func,
    flash_attn_varlen_func,
    flex_attention,
    scaled_dot_product_attention,
)
from flash_dist.errors import FlashDistError
from flash_dist.kernels.problem import NOT_PACKED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Tensor = torch.Tensor
CAUSAL = [0, -1, 0, 1]
SCALE = 0.25
DYNAMIC = ({0: torch.export.Dim("batch"), 1: torch.export.Dim("seqlen", max=4096)},)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    return out.square().sum() + (lse * lse).sum()


def gradients(pair: tuple[Tensor, Tensor], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(*pair), inputs, retain_graph=True)


def assert_same(got: tuple[Tensor | None, ...], want: tuple[Tensor | None, ...]) -> None:
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if a is not None and b is not None else a is b


@pytest.mark.parametrize("seqlen_k", [1, 7])
def test_an_operator_called_by_hand_has_gradients(seqlen_k: int) -> None:
    inputs = draw(2, 5, 4, 16), draw(2, seqlen_k, 2, 16), draw(2, seqlen_k, 2, 8)
    pairs = (
        torch.ops.flash_dist.attention(*inputs, None, CAUSAL, *NOT_PACKED, SCALE),
        flash_attn_func(*inputs, causal=True, softmax_scale=SCALE, return_lse=True),
    )
    assert_same(*(gradients(pair, inputs) for pair in pairs))
    of_lse = (torch.autograd.grad(pair[1].sum(), inputs, allow_unused=True) for pair in pairs)
    assert_same(*of_lse)


def test_an_operator_with_a_mask_called_by_hand_has_gradients() -> None:
    inputs = draw(2, 5, 4, 16), draw(2, 5, 2, 16), draw(2, 5, 2, 8)
    mask = BlockMask.documents([0, 0, 1, 1, 1])
    where = None, mask.handle, 1, 1, False, SCALE, False, False
    got = torch.ops.flash_dist.attention_masked(*inputs, *where)
    want = flash_attn_func(*inputs, mask=mask, softmax_scale=SCALE, return_lse=True)
    del mask  # the graph must keep it alive
    assert_same(gradients(got, inputs), gradients(want, inputs))


@pytest.mark.parametrize("lengths", [(1, 1, 1), (3, 0, 4)], ids=["one-key", "several"])
def test_a_packed_operator_called_by_hand_has_gradients(lengths: tuple[int, ...]) -> None:
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()
    total = sum(lengths)
    inputs = draw(total, 4, 16), draw(total, 2, 16), draw(total, 2, 8)
    packing = ends, ends, max(lengths), max(lengths)
    got = torch.ops.flash_dist.attention(*inputs, None, CAUSAL, *packing, SCALE)
    q, k, v = inputs
    longest = max(lengths)
    want = flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, causal=True, softmax_scale=SCALE, return_lse=True
    )
    rows = got[1].isfinite()
    pairs = ((out, lse[rows]) for out, lse in (got, want))
    assert_same(*(gradients(pair, inputs) for pair in pairs))


def test_an_operators_second_derivative_is_refused_rather_than_wrong() -> None:
    inputs = draw(1, 5, 2, 8), draw(1, 5, 2, 8), draw(1, 5, 2, 8)
    out, _ = torch.ops.flash_dist.attention(*inputs, None, CAUSAL, *NOT_PACKED, SCALE)
    (dq,) = torch.autograd.grad(out.square().sum(), inputs[:1], create_graph=True)
    with pytest.raises(FlashDistError, match="has first derivatives only"):
        dq.sum().backward()


def test_autocast_leaves_the_formulas_of_an_operator_alone() -> None:
    q, k, v = (draw(1, 5, 2, 8).detach().float() for _ in range(3))
    call = None, CAUSAL, *NOT_PACKED, SCALE
    want = torch.ops.flash_dist.attention(q, k, v, *call)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.ops.flash_dist.attention(q, k, v, *call)
    assert_same(got, want)


class Layer(torch.nn.Module):
    """Projection and attention, as in a model."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.options = options

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        out, lse = flash_attn_func(q, k, v, **self.options, return_lse=True)
        return out.flatten(-2), lse


def train(module: torch.nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    loss_of(*module(x)).backward()
    found = [parameter.grad for parameter in module.parameters()]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found if gradient is not None]


@pytest.mark.parametrize("dynamic", [None, DYNAMIC], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("strict", [False, True], ids=["traced", "dynamo"])
@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")  # torch's own
@pytest.mark.parametrize("mask", [None, BlockMask.sliding_window(2, 0)], ids=["causal", "band"])
def test_an_exported_module_trains(mask: BlockMask | None, *, strict: bool, dynamic: Any) -> None:  # noqa: ANN401
    layer, x = (
        Layer(**({"causal": True} if mask is None else {"mask": mask})),
        draw(2, 5, 16).detach(),
    )
    want = train(layer, x)
    program = torch.export.export(layer, (x,), strict=strict, dynamic_shapes=dynamic)
    for module in (program.module(), program.run_decompositions().module()):
        got = train(module, x)
        assert all(map(torch.equal, got, want))
    if dynamic is not None:
        x = draw(3, 9, 16).detach()
        assert all(map(torch.equal, train(program.module(), x), train(layer, x)))


def test_a_compiled_exported_module_trains() -> None:
    layer, x = Layer(causal=True), draw(2, 5, 16).detach()
    want = train(layer, x)
    module = torch.export.export(layer, (x,)).module()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, train(compiled, x), want))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch.compile has warnings of its own
def test_a_package_of_aotinductor_holds_the_operator(tmp_path: Path) -> None:
    layer, x = Layer(causal=True), draw(2, 5, 16).detach()
    with torch.no_grad():
        program = torch.export.export(layer, (x,), dynamic_shapes=DYNAMIC)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2")
        )
        package = torch._inductor.aoti_load_package(path)
        for one in (x, draw(3, 9, 16).detach()):
            torch.testing.assert_close(tuple(package(one)), layer(one))
    load = f"torch._inductor.aoti_load_package({str(path)!r})(torch.ones(2, 5, 16).double())"
    for first, status in (("", 1), ("from flash_dist import flash_attn_func; ", 0)):
        command = [sys.executable, "-c", f"import torch; {first}{load}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert ("flash_dist::attention" in done.stderr) == (status == 1), done.stderr


CU_SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)


HI = torch.tensor([1, 3, 3, 4, 8, 8, 7, 8], dtype=torch.int32)
DENSE = torch.arange(8) < HI[:, None]
MASK = BlockMask.from_dense(DENSE)
OF_TORCH = create_block_mask(lambda _b, _h, q, k: k <= q + 1, 1, 1, 8, 8, device="cpu")


def attend_intervals(q: Tensor, **options: Any) -> Tensor:  # noqa: ANN401 - of flash_attn_func
    mask = IntervalMask.of(torch.zeros_like(HI), HI, seqlen_k=8)
    out: Tensor = flash_attn_func(q, q, q, mask=mask, **options)
    return out


def ignore_warnings_of_traces(function: Callable[..., None]) -> Callable[..., None]:
    deprecated = "ignore:`torch.jit.(trace|save|load|trace_method)` is deprecated"
    for ignored in (deprecated, "ignore::torch.jit.TracerWarning"):
        function = pytest.mark.filterwarnings(ignored)(function)
    return function


@ignore_warnings_of_traces
@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda q: flash_attn_func(q, q, q, causal=True), (2, 8, 2, 16)),
        (lambda q: flash_attn_func(q, q, q, softcap=3.0), (2, 8, 2, 16)),
        (lambda q: flash_attn_varlen_func(q, q, q, CU_SEQLENS, CU_SEQLENS, 5, 5), (8, 2, 16)),
        (attend_intervals, (2, 8, 2, 16)),
        (lambda q: attend_intervals(q, softcap=3.0), (2, 8, 2, 16)),
    ],
    ids=["plain", "scored", "packed", "intervals", "scored intervals"],
)
def test_a_trace_has_the_gradients_and_is_saved(
    function: Callable[[Tensor], Tensor], shape: tuple[int, ...], tmp_path: Path
) -> None:
    traced: Any = torch.jit.trace(function, (draw(*shape),))
    traced.save(str(tmp_path / "trace.pt"))
    q = draw(*shape)
    for module in (traced, torch.jit.load(str(tmp_path / "trace.pt"))):
        got, want = module(q), function(q)
        assert torch.equal(got, want)
        (dq,), (wanted,) = (torch.autograd.grad(x.square().sum(), (q,)) for x in (got, want))
        torch.testing.assert_close(dq, wanted)


@ignore_warnings_of_traces
@pytest.mark.parametrize("wants_gradients", [False, True])
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda q: flash_attn_func(q, q, q, mask=MASK), "takes a mask that is a band only, got <"),
        (
            lambda q: flash_attn_func(q, q, q, mask=MASK, softcap=3.0),
            "takes a mask that is a band only, got <BlockMask",
        ),
        (
            lambda q: scaled_dot_product_attention(q, q, q, DENSE),
            "must be given no attn_mask, got one",
        ),
        (
            lambda q: flex_attention(q, q, q, block_mask=OF_TORCH),
            "must be given no block_mask, got one",
        ),
    ],
    ids=["plain", "scored", "dense", "of torch"],
)
def test_a_mask_that_another_process_would_not_find_is_not_traced(
    function: Callable[[Tensor], Tensor],
    message: str,
    wants_gradients: bool,  # noqa: FBT001
) -> None:
    q = draw(2, 8, 8, 16).detach().requires_grad_(wants_gradients)
    with pytest.raises(TypeError, match=rf"(?s)torch\.jit\.trace {message}.*hint: .*IntervalMask"):
        torch.jit.trace(function, (q,))
