"""torch.compile, CUDA graphs and operator checks."""

from __future__ import annotations

import gc
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from packaging.version import Version
from torch._dynamo.testing import CompileCounterWithBackend

from flash_dist import flash_attn_func, flash_attn_varlen_func
from flash_dist.errors import FlashDistError
from flash_dist.masks import BlockMask
from tests.gpu.packed import attend_packed, boundaries, pack
from tests.gpu.running import attend, peak_of, poison_memory, workspace
from tests.masks import masked_problem
from tests.reference import NAMES, Problem, assert_same_bits

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.filterwarnings("default")  # torch.compile emits warnings

SHAPE: dict[str, Any] = {"batch": 2, "seqlen_q": 200, "num_heads": 4, "num_heads_kv": 2}
MASKS = ("causal", "window", "sixteen-blocks", "dense-per-batch-and-head")


def run(attention: Callable[..., Any], problem: Problem) -> dict[str, torch.Tensor]:
    """Return copies of the results of a compiled function and its backward."""
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse = attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    tensors = (x.detach().clone() for x in (out, lse, *grads))
    return dict(zip(NAMES, tensors, strict=True))


def compiled(problem: Problem, **options: Any) -> Callable[..., Any]:  # noqa: ANN401 - of compile
    torch._dynamo.reset()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:  # noqa: ANN401
        return flash_attn_func(q, k, v, return_lse=True, **problem.options)

    return torch.compile(attention, fullgraph=True, **options)


def at_odd_addresses(problem: Problem) -> Problem:
    """Return the same problem with tensors that begin 1 element after a multiple of 16 bytes."""

    def move(x: torch.Tensor) -> torch.Tensor:
        return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)

    q, k, v, dout = map(move, (problem.q, problem.k, problem.v, problem.dout))
    return replace(problem, q=q, k=k, v=v, dout=dout)


@pytest.mark.gpu
@pytest.mark.parametrize("wrap", [lambda f: f, partial(torch.compile, fullgraph=True)])
@pytest.mark.parametrize("name", ["causal", "sixteen-blocks"])
def test_tensors_at_odd_addresses_give_the_bits_of_aligned_ones(
    name: str, wrap: Callable[..., Any], any_half: torch.dtype
) -> None:
    problem = masked_problem(name, **SHAPE, dtype=any_half)
    torch._dynamo.reset()

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:  # noqa: ANN401
        return flash_attn_func(q, k, v, return_lse=True, **problem.options)

    call = wrap(attention)
    assert_same_bits(run(call, problem), run(call, at_odd_addresses(problem)), name)


def test_masks_that_follow_the_second_compile_nothing(any_half: torch.dtype) -> None:
    problem = masked_problem("sixteen-blocks", **SHAPE, dtype=any_half)
    assert problem.visible is not None
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend=counter)
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask) -> Any:  # noqa: ANN401
        return flash_attn_func(q, k, v, mask=mask)

    for _ in range(6):
        mask = BlockMask.from_dense(problem.visible)
        out = attention(problem.q, problem.k, problem.v, mask)
        assert torch.equal(out, attend(problem)["out"])
    assert counter.frame_count == 2


@pytest.mark.parametrize("name", MASKS)
def test_compiled_without_graph_break_gives_the_same_bits(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=half)
    attention = compiled(problem, backend="aot_eager")
    assert_same_bits(attend(problem), run(attention, problem), "eager and compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "dense-per-batch-and-head"])
def test_compiled_by_inductor_gives_the_same_bits(name: str, any_half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=any_half)
    assert_same_bits(attend(problem), run(compiled(problem), problem), "eager and compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "dense-per-batch-and-head"])
def test_reduced_overhead_gives_the_same_bits(name: str, any_half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=any_half)
    eager = attend(problem)
    attention = compiled(problem, mode="reduce-overhead")
    for step in range(4):  # warm up, record, replay
        torch.compiler.cudagraph_mark_step_begin()
        assert_same_bits(eager, run(attention, problem), f"eager and step {step}")


@pytest.mark.gpu
def test_compiled_documents_give_the_same_bits(any_half: torch.dtype) -> None:
    packed = pack((100, 0, 65, 35), num_heads=4, num_heads_kv=2, dtype=any_half, causal=True)
    given = boundaries(packed, packed.problem.q.device)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:  # noqa: ANN401
        return flash_attn_varlen_func(q, k, v, **given, causal=True, return_lse=True)

    problem = packed.problem
    q, k, v = (x[0].detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    out, lse = attention(q, k, v)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout[0])
    tensors = (x.detach()[None] for x in (out, lse, *grads))
    result = dict(zip(NAMES, tensors, strict=True))
    assert_same_bits(attend_packed(packed), result, "eager and compiled")


@pytest.mark.gpu
@pytest.mark.parametrize("name", MASKS)
def test_a_cuda_graph_replays_the_same_bits(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=half)
    eager = attend(problem)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(problem, poison=False)
    for _ in range(3):
        for x in captured.values():
            x.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(eager, captured, "eager and replayed")


@pytest.mark.gpu
def test_a_cuda_graph_outlives_its_mask(any_half: torch.dtype) -> None:
    problem = masked_problem("dense-per-head", **SHAPE, dtype=any_half)
    assert problem.visible is not None
    eager = attend(problem)
    mask = BlockMask.from_dense(problem.visible)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(problem, poison=False, mask=mask)
    del mask
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(4):
        poison_memory(problem.q.device)
        graph.replay()
        assert_same_bits(eager, captured, "eager and replayed")


@pytest.mark.gpu
def test_a_mask_first_used_under_capture_works_or_says_why_not(half: torch.dtype) -> None:
    problem = masked_problem("dense", **SHAPE, dtype=half)
    eager = attend(problem)
    assert problem.visible is not None
    fresh = BlockMask.from_dense(problem.visible)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            captured = attend(problem, poison=False, mask=fresh)
    except FlashDistError as error:
        assert "captur" in str(error)  # noqa: PT017 - either is right
    else:
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits(eager, captured, "eager and replayed")
    assert_same_bits(eager, attend(problem), "before and after a capture")


def check_operators(
    problem: Problem, packing: tuple[Any, ...], mask: tuple[Any, ...], result: dict[str, Any]
) -> None:
    """Run torch's opcheck on the forward and the backward operator.

    Args:
        problem: The inputs.
        packing: The operators' arguments for packed sequences.
        mask: Arrays of the mask, their dS slots, and the integers that describe the mask.
        result: out and lse of the forward.
    """
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    data, slots, ints = mask
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    for inputs in ((q, k, v), leaves):
        torch.library.opcheck(
            torch.ops.flash_dist.attention.default,
            (*inputs, data, ints, *packing, problem.scale),
        )
    for batch_invariant in (False, True):
        torch.library.opcheck(
            torch.ops.flash_dist.attention_backward.default,
            (
                *(dout, q, k, v, result["out"], result["lse"], None),
                *(data, slots, ints, *packing, problem.scale, 1 << 30, batch_invariant),
            ),
        )


def test_opcheck_accepts_the_operators(dtype: torch.dtype) -> None:
    problem = masked_problem("causal", **SHAPE, dtype=dtype)
    mask = (None, None, [0, -1, 0, 1])
    check_operators(problem, (None, None, 0, 0), mask, attend(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sixteen-blocks", "dense-per-batch-and-head"])
def test_opcheck_accepts_the_operators_with_a_mask(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=half)
    plan = problem.options["mask"].plan(2, 4, 200, 200)
    mask = (plan.packed.cuda(), plan.key_slots, list(plan.layout))
    check_operators(problem, (None, None, 0, 0), mask, attend(problem))


@pytest.mark.gpu
def test_opcheck_accepts_the_operators_with_documents(half: torch.dtype) -> None:
    packed = pack((100, 0, 65, 35), num_heads=4, num_heads_kv=2, dtype=half)
    problem = packed.problem
    flat = Problem(problem.q[0], problem.k[0], problem.v[0], problem.dout[0])
    packing = tuple(boundaries(packed, problem.q.device).values())
    result = {name: x[0] for name, x in attend_packed(packed).items()}
    check_operators(flat, packing, (None, None, [0, -1, -1, 1]), result)


@pytest.mark.parametrize("name", ["sixteen-blocks", "dense-per-batch-and-head"])
def test_opcheck_accepts_the_operators_that_find_a_mask(name: str, half: torch.dtype) -> None:
    problem = masked_problem(name, **SHAPE, dtype=half)
    result = attend(problem)
    q, k, v, dout = problem.q, problem.k, problem.v, problem.dout
    call = None, problem.options["mask"].handle, 1, 1, False, problem.scale
    operators = torch.ops.flash_dist
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    for keep in (False, True):
        torch.library.opcheck(operators.attention_masked.default, (q, k, v, *call, keep, False))
        torch.library.opcheck(operators.attention_masked.default, (*leaves, *call, keep, False))
    saved = dout, q, k, v, result["out"], result["lse"], None
    for batch_invariant in (False, True):
        arguments = (*saved, *call, 1 << 30, batch_invariant)
        torch.library.opcheck(operators.attention_masked_backward.default, arguments)


def test_the_workspace_limit_of_a_compiled_function_is_that_of_the_moment(
    any_half: torch.dtype,
) -> None:
    problem = masked_problem("causal", batch=2, seqlen_q=1024, num_heads=8, dtype=any_half)
    attention = compiled(problem, backend="aot_eager")
    for megabytes in (1536, 0, 16, 1536):
        with workspace(megabytes):
            eager, graph = attend(problem, poison=False), run(attention, problem)
        assert_same_bits(eager, graph, f"{megabytes} MiB, eager and compiled")


@pytest.mark.gpu
def test_the_memory_of_a_compiled_backward_follows_the_limit(any_half: torch.dtype) -> None:
    problem = masked_problem(
        "causal", batch=2, seqlen_q=1024, num_heads=8, head_dim=192, dtype=any_half
    )  # a head_dim without fused backward: dS is stored
    attention = compiled(problem, backend="aot_eager")
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))

    def step() -> object:
        return torch.autograd.grad(attention(q, k, v)[0], (q, k, v), problem.dout)

    peaks = {}
    for megabytes in (1536, 0):
        with workspace(megabytes):
            peaks[megabytes] = peak_of(step)
    tiles = 2 * 8 * (16 * 17 // 2)  # dS tiles, too many for the second limit
    assert peaks[1536] - peaks[0] == 8192 * tiles


class Causal(torch.nn.Module):
    """The module that a test exports."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True)


def test_an_exported_program_gives_the_gradients_of_its_module(half: torch.dtype) -> None:
    problem = masked_problem("causal", **SHAPE, dtype=half)
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    exported = torch.export.export(Causal(), (q, k, v)).module()
    grads = torch.autograd.grad(exported(q, k, v), (q, k, v), problem.dout)
    want = attend(problem)
    got = dict(zip(("dq", "dk", "dv"), grads, strict=True))
    assert_same_bits(got, {name: want[name] for name in got}, "exported and not")


@pytest.mark.gpu
@pytest.mark.skipif(
    Version(torch.__version__) < Version("2.13"),
    reason="a package's constructor dies in std::regex there, with torch's own attention as well",
)
def test_a_package_of_aotinductor_gives_the_same_bits(half: torch.dtype, tmp_path: Path) -> None:
    problem = masked_problem("causal", **SHAPE, dtype=half)
    inputs = problem.q, problem.k, problem.v
    with torch.no_grad():
        program = torch.export.export(Causal(), inputs)
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "causal.pt2")
        )
        out = torch._inductor.aoti_load_package(path)(*inputs)
    assert_same_bits({"out": out}, {"out": attend(problem)["out"]}, "package and not")


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["alone", "alive"])
@pytest.mark.parametrize("name", ["ours", "packed", "masked"])
def test_graphed_callables_hold_attention_wherever_they_hold_torchs(name: str, state: str) -> None:
    program = Path(__file__).with_name("graphed.py")

    def run(which: str) -> str:
        command = [sys.executable, str(program), which, state]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    got = run(name)
    if state == "alone":
        assert got == "same"
    elif got != "same":  # a graph on another stream: torch raises its own error
        assert got == run("torch")


@pytest.mark.parametrize("half_or_single", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_torch_func_gives_the_bits_of_autograd(half_or_single: torch.dtype) -> None:
    problem = masked_problem("causal", **SHAPE, dtype=half_or_single)

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return flash_attn_func(q, k, v, causal=True)

    inputs = problem.q, problem.k, problem.v
    out, pull, *_ = torch.func.vjp(attention, *inputs)
    got = dict(zip(("out", "dq", "dk", "dv"), (out, *pull(problem.dout)), strict=True))
    want = attend(problem)
    assert_same_bits(got, {name: want[name] for name in got}, "vjp and autograd")
    mapped = torch.vmap(attention)(*(x.unsqueeze(1) for x in inputs))
    assert_same_bits({"out": mapped.squeeze(1)}, {"out": want["out"]}, "vmap and batch")
