"""References for the kernels: float64, and the error of torch's own MATH backend.

This module uses nothing of the package, so that one mistake cannot be in both.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dist.toolkit.selftest.comparison import find_bit_difference

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

Tensor = torch.Tensor
NAMES: Final = ("out", "lse", "dq", "dk", "dv")
DEVICE: Final = os.environ.get("FLASH_DIST_TEST_DEVICE", "cuda")
MARGIN: Final = 2.0  # factor on the error of torch's MATH backend
FP32_ERROR: Final = 2.0**-22  # relative to 4 + the largest score, see `bound_single`
SIGMAS: Final = 5.0  # allowed standard deviations of rounding errors; 1 of 2 million is beyond
LSE_ERROR: Final = 1e-4  # relative to 1 + |lse|


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call; q may have five axes."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    visible: Tensor | None = None  # [batch or 1, heads or 1, seqlen_q, seqlen_k]; None: all keys
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments with the same meaning
    softmax_scale: float | None = None
    dlse: Tensor | None = None  # [batch, num_heads_q, seqlen_q]
    name: str = ""

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale

    def __str__(self) -> str:
        dtype = str(self.q.dtype).removeprefix("torch.")
        return f"{self.name} {dtype} q {list(self.q.shape)} k {list(self.k.shape)}"


def random_problem(  # noqa: PLR0913 - a shape
    *,
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float16,
    causal: bool = False,
    device: str = DEVICE,
    seed: int = 0,
    name: str = "",
) -> Problem:
    """Return normal random inputs, equal for equal arguments."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(seqlen: int, heads: int, dim: int) -> Tensor:
        return torch.randn(batch, seqlen, heads, dim, generator=generator, device=device).to(dtype)

    keys = seqlen_k or seqlen_q
    heads_kv = num_heads_kv or num_heads
    dim_v = head_dim_v or head_dim
    return Problem(
        draw(seqlen_q, num_heads, head_dim),
        draw(keys, heads_kv, head_dim),
        draw(keys, heads_kv, dim_v),
        draw(seqlen_q, num_heads, dim_v),
        bottom_right(seqlen_q, keys).to(device) if causal else None,
        {"causal": True} if causal else {},
        name=name or ("causal" if causal else "full"),
    )


def shaped_problem(
    shape: tuple[int, int, int, int, int],
    head_dims: tuple[int, int],
    **others: Any,  # noqa: ANN401
) -> Problem:
    """Return `random_problem` of a shape: batch, seqlen_q, seqlen_k, num_heads, num_heads_kv."""
    head_dim, head_dim_v = head_dims
    return random_problem(**name_sizes(shape), head_dim=head_dim, head_dim_v=head_dim_v, **others)


def name_sizes(shape: Iterable[int]) -> dict[str, Any]:
    """Return a shape, batch, seqlen_q, seqlen_k, num_heads and num_heads_kv, as arguments."""
    names = ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv")
    return dict(zip(names, shape, strict=True))


def bottom_right(seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return the causal mask whose last query sees every key."""
    ones = torch.ones(1, 1, seqlen_q, seqlen_k, dtype=torch.bool, device="cpu")
    return ones.tril(seqlen_k - seqlen_q)


def _heads_first(x: Tensor, heads: int) -> Tensor:
    """Return [batch, seqlen, ..., dim] as [batch, heads, seqlen, dim], kv heads repeated."""
    x = x.flatten(2, -2).transpose(1, 2)
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _read_heads_first(problem: Problem) -> list[Tensor]:
    """Return q, k, v and dout in float64, as of `_heads_first`."""
    heads = problem.q[0, 0, ..., 0].numel()
    tensors = problem.q, problem.k, problem.v, problem.dout
    return [_heads_first(x.double(), heads) for x in tensors]


def _heads_last(x: Tensor, like: Tensor) -> Tensor:
    """Return [batch, num_heads_q, seqlen, dim] in the shape of `like`, summed over a group."""
    heads = like[0, 0, ..., 0].numel()
    x = x.unflatten(1, (heads, -1)).sum(2) if heads != x.shape[1] else x
    return x.transpose(1, 2).reshape(*like.shape[:-1], x.shape[-1])


def _softmax(problem: Problem, scores: Tensor) -> Tensor:
    """Return the softmax over the visible keys; a row without a visible key is zero."""
    if problem.visible is None:
        return scores.softmax(-1)
    weights = scores.masked_fill(~problem.visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~problem.visible.any(-1, keepdim=True), 0.0)


def compute_exact(problem: Problem) -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv in float64."""
    q, k, v, dout = _read_heads_first(problem)
    scores = q @ k.mT * problem.scale
    if problem.visible is not None:
        scores = scores.masked_fill(~problem.visible, -torch.inf)
    lse = scores.logsumexp(-1)
    p = _softmax(problem, scores)
    out = p @ v
    delta = (dout * out).sum(-1, keepdim=True)
    if problem.dlse is not None:
        delta = delta - problem.dlse.double().unsqueeze(-1)
    ds = p * (dout @ v.mT - delta) * problem.scale
    return {
        "out": _heads_last(out, problem.q),
        "lse": lse,
        "dq": _heads_last(ds @ k, problem.q),
        "dk": _heads_last(ds.mT @ q, problem.k),
        "dv": _heads_last(p.mT @ dout, problem.v),
    }


def bound_single(problem: Problem) -> dict[str, float]:
    """Return the allowed errors of out, dq, dk, dv in float32.

    A score is rounded to 2^-24 of its value, and its exponential has that error in any
    implementation: the error grows with the largest score, as torch's own does. The bound is
    relative to the largest value of the same formula with absolute values, since gradients are sums
    that cancel.
    """
    heads = problem.q[0, 0, ..., 0].numel()
    q, k, v, dout = (
        _heads_first(x.double().nan_to_num(0.0, 0.0, 0.0), heads)
        for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    scores = q @ k.mT * problem.scale
    p = _softmax(problem, scores)
    if problem.visible is not None:
        scores = scores.masked_fill(~problem.visible, 0.0)
    q, k, v, dout = q.abs(), k.abs(), v.abs(), dout.abs()
    delta = (dout * (p @ v)).sum(-1, keepdim=True)
    if problem.dlse is not None:
        delta = delta + problem.dlse.double().abs().unsqueeze(-1)
    ds = p * (dout @ v.mT + delta) * problem.scale
    sizes = {
        "out": p @ v,
        "dq": ds @ k,
        "dk": _heads_last(ds.mT @ q, problem.k),
        "dv": _heads_last(p.mT @ dout, problem.v),
    }
    error = FP32_ERROR * (4 + float(_max_of(scores)))
    return {name: error * float(_max_of(size)) for name, size in sizes.items()}


def size_terms(problem: Problem) -> Tensor:
    """Return the largest score of each row, computed from the absolute values of q and k.

    The error of a sum in float32 is a fraction of this score, also if the terms cancel.
    """
    heads = problem.q[0, 0, ..., 0].numel()
    q, k = (
        _heads_first(x.double().nan_to_num(0.0, 0.0, 0.0).abs(), heads)
        for x in (problem.q, problem.k)
    )
    terms = q @ k.mT * problem.scale
    if problem.visible is not None:
        terms = terms.masked_fill(~problem.visible, 0.0)
    return terms.amax(-1) if terms.shape[-1] else terms.sum(-1)


def bound_delta(problem: Problem) -> dict[str, Tensor]:
    """Return the errors of dq and dk from delta and dS in 16 bits alone, about 1 sigma.

    The backward of flash-attention (Dao, arXiv:2205.14135, section B.2) subtracts delta, the sum of
    dout * out, from dP, the sum of dout * v. If one key has nearly all the weight of a row, the two
    cancel and the true gradient vanishes. What remains is rounding: that of the stored out to 16
    bits, independent for each element, and that of the two sums in float32. A formula that keeps
    the weights gives 0 there. dS is rounded for the products with k and q, in torch as well; with
    few remaining terms, either result may be nearer to float64 by chance.
    """
    q, k, v, dout = _read_heads_first(problem)
    p = _softmax(problem, q @ k.mT * problem.scale)
    out = p @ v
    rounding = out.to(problem.q.dtype) - out  # 0 with one key, as out is v
    delta = (dout * rounding).norm(dim=-1, keepdim=True)
    delta = delta + 2.0**-23 * (dout * out).abs().sum(-1, keepdim=True)
    exact = dout @ v.mT - (dout * out).sum(-1, keepdim=True)
    if problem.dlse is not None:
        exact = exact + problem.dlse.double().unsqueeze(-1)
    unit = torch.finfo(problem.q.dtype).eps / 2 / 3**0.5  # standard deviation of a rounding error
    cut = (unit * p * exact).square()
    if problem.q.dtype == torch.float16:  # subnormal numbers; dS is rounded as dS / 4
        cut = cut + (p > 0) * (4 * 2.0**-24) ** 2 / 12
    dq_squared = (delta * (p @ k)).square() + cut @ k.square()
    dk_squared = p.square().mT @ (delta * q).square() + cut.mT @ q.square()
    return {
        "dq": _heads_last(dq_squared, problem.q).sqrt() * problem.scale,
        "dk": _heads_last(dk_squared, problem.k).sqrt() * problem.scale,
    }


def bound_weights(problem: Problem) -> dict[str, Tensor]:
    """Return the errors of out and dv from rounding P to 16 bits, about 1 sigma.

    Torch rounds P, too; with few keys or rows, either result may be nearer to float64 by chance.
    """
    q, k, v, dout = _read_heads_first(problem)
    p = _softmax(problem, q @ k.mT * problem.scale)
    cut = (p * (torch.finfo(problem.q.dtype).eps / 2 / 3**0.5)).square()
    return {
        "out": _heads_last(cut @ v.square(), problem.q).sqrt(),
        "dv": _heads_last(cut.mT @ dout.square(), problem.v).sqrt(),
    }


def compute_half(problem: Problem) -> dict[str, Tensor]:
    """Return out, dq, dk, dv of torch's SDPA with its MATH backend, in the inputs' dtype.

    By default that backend computes in float32 and rounds once; here each step uses the inputs'
    dtype. The backend returns no lse: gradients of lse come from scores in the same dtype.
    """
    q, k, v = (x.detach().requires_grad_() for x in (problem.q, problem.k, problem.v))
    heads = q[0, 0, ..., 0].numel()
    qh, kh, vh = (_heads_first(x, heads) for x in (q, k, v))
    seen = problem.visible
    any_key = None if seen is None else seen.any(-1, keepdim=True)
    shown = None if seen is None or any_key is None else seen | ~any_key
    with _math_in_half():
        out = torch.nn.functional.scaled_dot_product_attention(
            qh, kh, vh, attn_mask=shown, scale=problem.scale
        )
    out = out if any_key is None else out * any_key
    outputs, grads = [_heads_last(out, problem.q)], [problem.dout]
    if problem.dlse is not None:
        scores = qh @ kh.mT * problem.scale
        scores = scores if seen is None else scores.masked_fill(~seen, -1e4)
        outputs.append(scores.logsumexp(-1))
        grads.append(problem.dlse.to(q.dtype))
    computed = torch.autograd.grad(outputs, (q, k, v), grads)
    return dict(zip(("out", "dq", "dk", "dv"), (outputs[0].detach(), *computed), strict=True))


@contextmanager
def _math_in_half() -> Iterator[None]:
    """Select the MATH backend, and make it compute in 16 bits."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)  # noqa: FBT003 - torch's signature
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(allowed)


def find_faults(
    actual: Mapping[str, Tensor],
    problem: Problem,
    *,
    half: Mapping[str, Tensor] | None = None,
    exact: Mapping[str, Tensor] | None = None,
) -> list[str]:
    """Name the tensors with too large errors.

    The allowed error is twice that of torch's MATH backend, in maximum and in root mean square. In
    float32 it is that of `bound_single`. For lse it is 1e-4 (1 + |lse|) + 2^-22 of `size_terms`.
    Results that vanish, such as gradients with one key, may have the error from rounding the
    inputs. out and dv may also have that of `bound_weights`, dq and dk that of `bound_delta`.

    Args:
        actual: Results of the tested function, any of NAMES.
        problem: Its inputs.
        half: Results that replace `compute_half` for the allowed error.
        exact: The float64 reference, if already computed.
    """
    exact = exact or compute_exact(problem)
    single = problem.q.dtype == torch.float32
    half = half or ({} if single else compute_half(problem))
    bounds = bound_single(problem) if single else {}
    names = [name for name in NAMES if name in actual]
    sizes = {"out": problem.v, "dq": problem.dout, "dk": problem.dout, "dv": problem.dout}
    rows = []
    for name in names:
        got, want = actual[name].double(), exact[name]
        assert got.shape == want.shape, f"{name} has shape {list(got.shape)}: {problem}"
        finite = want.isfinite()
        error = torch.where(finite, got - want, 0.0)
        want = torch.where(finite, want, 0.0)
        if name == "lse":
            error = error / (1 + want.abs() + size_terms(problem) * (FP32_ERROR / LSE_ERROR))
        allowed = half[name].double() - want if name in half else torch.zeros_like(want[:1])
        size = sizes.get(name, want)
        rows.append(
            torch.stack(
                (
                    (got.isfinite() != finite).sum().double(),
                    *(f(x) for x in (error, allowed, want) for f in (_max_of, _rms_of)),
                    _max_of(size.double()),
                )
            )
        )
    if not rows:
        return []
    found = []
    for name, row in zip(names, torch.stack(rows).tolist(), strict=True):
        text = _judge(name, row, problem.q.dtype, bounds.get(name))
        if text and not single and name != "lse":  # rarely needed, and expensive
            of_ds = name in {"dq", "dk"}
            left = (bound_delta if of_ds else bound_weights)(problem)[name]
            more = (
                SIGMAS * float(_max_of(left)),
                (SIGMAS if of_ds else MARGIN) * float(_rms_of(left)),
            )
            text = _judge(name, row, problem.q.dtype, None, more)
        if text:
            found.append(f"{problem}: {name} {text}")
    return found


def _judge(
    name: str,
    row: list[float],
    dtype: torch.dtype,
    single: float | None,
    more: tuple[float, float] = (0.0, 0.0),
) -> str | None:
    """Describe what is wrong with one tensor's errors, None if nothing is.

    Args:
        name: Name of the tensor.
        row: Measurements of `find_faults`.
        dtype: Dtype of the problem.
        single: float32's bound.
        more: Additional allowed error, in maximum and root mean square.
    """
    misplaced, *pairs, size = row
    if misplaced:
        return f"has {misplaced:.0f} elements that are finite where they should not be, or not"
    errors, baseline, wanted = pairs[:2], pairs[2:4], pairs[4:]
    if name == "lse":
        return None if errors[0] <= LSE_ERROR else f"is off by {errors[0]:.3g} of 1 + |lse|"
    kinds = ("max", "rms")
    for kind, error, base, want, left in zip(kinds, errors, baseline, wanted, more, strict=True):
        bound = _allowed(base, want, size, dtype, left) if single is None else single
        if not error <= bound:
            return f"{kind} error {error:.3g}, allowed {bound:.3g} (largest value {wanted[0]:.3g})"
    return None


def _allowed(base: float, want: float, size: float, dtype: torch.dtype, left: float) -> float:
    """Return the allowed error.

    If half precision is exact by chance (one key: gradients of zero), the rounding of the result
    and of float32 sums remains.
    """
    return max(MARGIN * base, torch.finfo(dtype).eps / 2 * want + 1e-5 * size + left + 2.0**-25)


def assert_close(actual: Mapping[str, Tensor], problem: Problem) -> None:
    """Raise with every tensor whose error exceeds that of `find_faults`."""
    faults = find_faults(actual, problem)
    assert not faults, "\n".join(faults)


def _max_of(x: Tensor) -> Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _rms_of(x: Tensor) -> Tensor:
    return x.square().mean().sqrt() if x.numel() else x.new_zeros(())


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    """Compare bit patterns; a failure names the first coordinate, both values and the count."""
    for name, a in first.items():
        difference = find_bit_difference(name, a, second[name])
        assert difference is None, f"{what}: {difference}"
