"""Tests of both functions against float64. GPU tests are skipped without a GPU."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING

import own_kernels
import pytest
import torch
from own_kernels import rms_norm, silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable

EPS = 1e-5
GPUS = torch.cuda.device_count()
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(GPUS == 0, reason="needs a GPU")),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)
on_a_gpu = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")
on_two_gpus = pytest.mark.skipif(GPUS in {0, 1}, reason="needs two GPUs")
on_hopper = pytest.mark.skipif(
    GPUS == 0 or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])

# rows and columns: one, odd, one off each compiled size, and more rows than blocks run at a time
SHAPES = [(1, 1), (3, 7), (5, 256), (2, 257), (7, 1000), (4, 1023), (3, 1024), (2, 2056), (2, 4095)]
LARGE = [(3000, 256), (5003, 1024), (2600, 2048), (1300, 4096), (700, 8192), (700, 8191)]


@pytest.fixture(autouse=True)
def _poison_new_memory() -> None:
    """Fill memory that torch reuses with NaN: a kernel must write all of its output."""
    for device in range(GPUS):
        sizes = (1 << 26, *[1 << 16] * 32)  # large and small tensors have separate memory
        _ = [torch.full((size,), torch.nan, device=f"cuda:{device}") for size in sizes]


def make(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


@cache
def built() -> frozenset[str]:
    """Return the dtypes and families of the kernels that the GPU uses from this build."""
    from own_kernels._toolkit.loading.library import select  # noqa: PLC0415

    chosen = [one for one in select(0) if one["chosen"]]
    return frozenset(x for one in chosen for x in (one["dtype"], one["chosen"]["family"]))


def make_case(rows: int, hidden: int, dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Return x, weight and dout."""
    if (device, dtype) == ("cuda", torch.bfloat16) and "bf16" not in built():
        pytest.skip("this build has no bfloat16 kernel for the GPU")
    shapes = (rows, hidden), (hidden,), (rows, hidden)
    return [make(*one, dtype=dtype, device=device, seed=i) for i, one in enumerate(shapes)]


def differentiate(
    x: torch.Tensor, weight: torch.Tensor, dout: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return out, dx and dweight."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    out = rms_norm(x, weight, EPS)
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def differentiate_exactly(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return out, dx and dweight, computed in float64 on the CPU."""
    x, weight, dout = (one.detach().cpu().double() for one in inputs)
    x.requires_grad_()
    weight.requires_grad_()
    out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight
    return out.detach(), *torch.autograd.grad(out, (x, weight), dout)


def assert_close(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """Allow twice the error of rounding the largest value; 16 times in float32."""
    steps = 8 if actual.dtype == torch.float32 else 1
    allowed = steps * torch.finfo(actual.dtype).eps * exact.abs().max().item() + 1e-6
    worst = (actual.cpu().double() - exact).abs().max().item()
    assert worst <= allowed, f"{worst} is off, allowed are {allowed}"


# --- RMS norm -------------------------------------------------------------------------------------


@on_each_device
@dtypes
@pytest.mark.parametrize(("rows", "hidden"), SHAPES)
def test_norm_and_gradients_are_those_of_float64(
    rows: int, hidden: int, dtype: torch.dtype, device: str
) -> None:
    inputs = make_case(rows, hidden, dtype, device)
    for actual, exact in zip(differentiate(*inputs), differentiate_exactly(*inputs), strict=True):
        assert_close(actual, exact)


@on_a_gpu
@dtypes
@pytest.mark.parametrize(("rows", "hidden"), LARGE)
def test_many_rows_give_right_values_and_the_same_bits_in_every_run(
    rows: int, hidden: int, dtype: torch.dtype
) -> None:
    inputs = make_case(rows, hidden, dtype, "cuda")
    first = differentiate(*inputs)
    for actual, exact in zip(first, differentiate_exactly(*inputs), strict=True):
        assert_close(actual, exact)
    for _ in range(10):
        again = differentiate(*inputs)
        assert all(map(torch.equal, first, again))


@on_hopper
def test_hopper_takes_its_own_family_and_leaves_unaligned_rows_to_the_other() -> None:
    from own_kernels._toolkit.loading.library import last_variant  # noqa: PLC0415

    if "rms_sm90" not in built():
        pytest.skip("this build has no code for 9.0a")
    x, weight, _ = make_case(2000, 1024, torch.bfloat16, "cuda")
    storage = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    unaligned = storage[1:].view_as(x).copy_(x)
    out = rms_norm(x, weight)
    assert last_variant()["rms"]["family"] == "rms_sm90"
    other = rms_norm(unaligned, weight)
    assert last_variant()["rms"]["family"] == "rms"
    assert torch.equal(out, other)  # same bits


@on_each_device
def test_rows_that_are_not_contiguous_are_copied(device: str) -> None:
    wide = make(6, 512, dtype=torch.float16, device=device)
    weight = make(512, dtype=torch.float16, device=device)[::2]
    x = wide[:, ::2]
    assert torch.equal(rms_norm(x, weight), rms_norm(x.contiguous(), weight.contiguous()))
    expanded = torch.ones((), dtype=torch.float16, device=device).expand(6, 256)  # as from sum()
    inputs = x, weight, expanded
    for actual, exact in zip(differentiate(*inputs), differentiate_exactly(*inputs), strict=True):
        assert_close(actual, exact)


@on_each_device
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 1000)])
def test_no_rows_give_no_output_and_a_gradient_of_zeros(
    shape: tuple[int, ...], device: str
) -> None:
    x = make(*shape, dtype=torch.float16, device=device)
    weight = make(shape[-1], dtype=torch.float16, device=device)
    out, dx, dweight = differentiate(x, weight, torch.empty_like(x))
    assert out.shape == dx.shape == shape
    assert torch.equal(dweight, torch.zeros_like(weight))


@on_each_device
def test_more_axes_are_more_rows(device: str) -> None:
    x, weight, _ = make_case(12, 256, torch.float16, device)
    assert torch.equal(rms_norm(x.view(2, 3, 2, 256), weight).view(12, 256), rms_norm(x, weight))
    assert torch.equal(rms_norm(x[0], weight), rms_norm(x, weight)[0])


@on_two_gpus
def test_a_tensor_of_another_than_the_current_gpu_is_computed_there() -> None:
    inputs = make_case(100, 1024, torch.float16, "cuda:0")
    there = [one.to("cuda:1") for one in inputs]
    with torch.cuda.device(0):
        results = differentiate(*there)
        product = silu_mul(there[0], there[2])
        assert torch.cuda.current_device() == 0
    assert {one.get_device() for one in (*results, product)} == {1}
    for here, other in zip(differentiate(*inputs), results, strict=True):
        assert torch.equal(here.cpu(), other.cpu())


@on_a_gpu
def test_it_runs_on_the_current_stream() -> None:
    x, weight, _ = make_case(4096, 4096, torch.float16, "cuda")
    expected = rms_norm(x, weight)
    late = torch.zeros_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)  # noqa: SLF001 - delays the copy below
        late.copy_(x)
        out = rms_norm(late, weight)
    stream.synchronize()
    assert torch.equal(out, expected)


@on_a_gpu
def test_more_columns_than_any_kernel_has_are_refused() -> None:
    x = torch.ones(1, 8193, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match="hidden 8193"):
        rms_norm(x, x[0])


def test_a_gradient_of_a_gradient_is_refused() -> None:
    x = torch.ones(1, 8, dtype=torch.float16, requires_grad=True)
    weight = torch.ones(8, dtype=torch.float16)
    (dx,) = torch.autograd.grad(rms_norm(x, weight).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="once"):
        dx.sum().backward()


# --- SiLU times another tensor --------------------------------------------------------------------


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [0, 1, 7, 8, 1001, 100_000])
def test_silu_mul_and_gradients_are_those_of_float64(
    count: int, dtype: torch.dtype, device: str
) -> None:
    a = make(count, dtype=dtype, device=device, seed=0).mul_(4).requires_grad_()
    b = make(count, dtype=dtype, device=device, seed=1).requires_grad_()
    exact_a, exact_b = (one.detach().cpu().double().requires_grad_() for one in (a, b))
    out, exact = silu_mul(a, b), torch.nn.functional.silu(exact_a) * exact_b
    results = out, *torch.autograd.grad(out.sum(), (a, b))
    exacts = exact, *torch.autograd.grad(exact.sum(), (exact_a, exact_b))
    for actual, value in zip(results, exacts, strict=True):
        assert actual.shape == (count,)
        if count:
            assert_close(actual.detach(), value.detach())


@on_each_device
def test_silu_mul_saturates(device: str) -> None:
    a = torch.tensor([-65504.0, 65504.0, -torch.inf, torch.inf, torch.nan], device=device).half()
    out = silu_mul(a, torch.ones_like(a)).tolist()
    assert out[:2] == [0.0, 65504.0]
    assert out[3] == float("inf")
    assert out[2] != out[2]  # -inf * 0, as in torch
    assert out[4] != out[4]


@on_each_device
def test_silu_mul_takes_slices_at_any_address(device: str) -> None:
    a, b = (make(1001, dtype=torch.float16, device=device, seed=i) for i in range(2))
    assert torch.equal(silu_mul(a[1:], b[:-1]), silu_mul(a[1:].clone(), b[:-1].clone()))
    assert torch.equal(silu_mul(a[::2], b[::2]), silu_mul(a[::2].clone(), b[::2].clone()))


# --- Both -----------------------------------------------------------------------------------------


@on_each_device
def test_the_operators_are_registered_as_torch_wants_them(device: str) -> None:
    x, weight, _ = (one.requires_grad_() for one in make_case(3, 16, torch.float16, device))
    torch.library.opcheck(torch.ops.own_kernels.rms_norm.default, (x, weight, EPS))
    torch.library.opcheck(torch.ops.own_kernels.silu_mul.default, (x, x))


HALF = torch.ones(2, 8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda: rms_norm(HALF.float(), HALF[0]),
            TypeError,
            "x must be float16 or bfloat16, got float32",
        ),
        (
            lambda: rms_norm(HALF, HALF[0].bfloat16()),
            TypeError,
            "weight must have the dtype of x, torch.float16, got torch.bfloat16",
        ),
        (
            lambda: rms_norm(HALF, HALF[0, :4]),
            ValueError,
            r"weight must have shape \[8\], got \[4\]",
        ),
        (
            lambda: rms_norm(HALF[:, :0], HALF[0, :0]),
            ValueError,
            r"x must have at least one column, got shape \[2, 0\]",
        ),
        (lambda: rms_norm(HALF, HALF[0], -1.0), ValueError, "eps must be at least 0, got -1.0"),
        (
            lambda: rms_norm(HALF, HALF[0].to("meta")),
            ValueError,
            "weight must be on cpu, as x, got meta",
        ),
        (
            lambda: silu_mul(HALF.double(), HALF.double()),
            TypeError,
            "a must be float16, bfloat16 or float32, got float64",
        ),
        (
            lambda: silu_mul(HALF, HALF[0]),
            ValueError,
            r"b must have shape \[2, 8\], got \[8\]",
        ),
    ],
)
def test_wrong_input_is_refused_in_a_sentence(
    call: Callable[[], object], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=f"^{sentence}$"):
        call()


@on_a_gpu
def test_the_operators_refuse_what_would_corrupt_memory() -> None:
    x = HALF.cuda()
    operators = torch.ops.own_kernels
    with pytest.raises(RuntimeError, match="x must be contiguous"):
        operators.rms_norm(x.T, x[0, :2], EPS)
    with pytest.raises(RuntimeError, match="weight must have one element for each column of x"):
        operators.rms_norm(x, x[0, :4], EPS)
    with pytest.raises(RuntimeError, match="b must be on the GPU of a"):
        operators.silu_mul(x, HALF)


def test_importing_the_package_does_not_import_torch() -> None:
    program = "import sys, own_kernels; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute `layer_norm`"):
        _ = own_kernels.layer_norm
