"""What the kernels are held against: float64, and the error of torch's own half precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from flash_dist.comparison import find_bit_difference
from flash_dist.reference import reference_backward, reference_forward, visible

if TYPE_CHECKING:
    from collections.abc import Mapping

Tensor = torch.Tensor
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Problem:
    """Inputs of one attention call."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    causal: bool = False
    softmax_scale: float | None = None

    @property
    def scale(self) -> float:
        """The factor on the scores."""
        return self.q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale


def random_problem(  # noqa: PLR0913 - a shape
    *,
    batch: int = 1,
    seqlen_q: int = 128,
    seqlen_k: int | None = None,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    causal: bool = False,
    device: str = "cuda",
    seed: int = 0,
) -> Problem:
    """Return normal random inputs, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)

    def draw(seqlen: int, heads: int) -> Tensor:
        return torch.randn(batch, seqlen, heads, head_dim, generator=generator).to(
            device=device, dtype=dtype
        )

    keys = seqlen_k or seqlen_q
    heads_kv = num_heads_kv or num_heads
    return Problem(
        draw(seqlen_q, num_heads),
        draw(keys, heads_kv),
        draw(keys, heads_kv),
        draw(seqlen_q, num_heads),
        causal,
    )


def compute_exact(problem: Problem) -> dict[str, Tensor]:
    """Return out, lse, dq, dk, dv in float64."""
    q, k, v, dout = (x.double() for x in (problem.q, problem.k, problem.v, problem.dout))
    out, lse = reference_forward(q, k, v, softmax_scale=problem.scale, causal=problem.causal)
    grads = reference_backward(
        dout, q, k, v, out, lse, None, softmax_scale=problem.scale, causal=problem.causal
    )
    return dict(zip(NAMES, (out, lse, *grads), strict=True))


def compute_half(problem: Problem) -> dict[str, Tensor]:
    """Return out, dq, dk, dv as torch computes them step by step in the inputs' dtype."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (problem.q, problem.k, problem.v))
    group = q.shape[2] // k.shape[2]
    qh = q.transpose(1, 2)
    kh, vh = (x.transpose(1, 2).repeat_interleave(group, dim=1) for x in (k, v))
    mask = visible(q.shape[1], k.shape[1], causal=problem.causal, device=q.device)
    scores = (qh @ kh.transpose(-1, -2) * problem.scale).masked_fill(~mask, -torch.inf)
    weights = scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    out = (weights @ vh).transpose(1, 2)
    grads = torch.autograd.grad(out, (q, k, v), problem.dout)
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *grads), strict=True))


def assert_close(actual: Mapping[str, Tensor], problem: Problem) -> None:
    """Allow twice the error of torch's half precision in maximum and root mean square.

    lse may be off by 1e-4 of its size.
    """
    exact = compute_exact(problem)
    half = compute_half(problem)
    for name in NAMES:
        if name not in actual:
            continue
        got, want = actual[name].double(), exact[name]
        finite = torch.isfinite(want)
        assert torch.equal(torch.isfinite(got), finite), (
            f"{name}: other elements are finite than in the reference"
        )
        error = (got - want)[finite]
        if name == "lse":
            assert error.abs().max() <= 1e-4 * (1 + want[finite].abs().max()), (
                f"lse: {error.abs().max()}"
            )
            continue
        allowed = (half[name].double() - want)[finite]
        floor = 5e-5 + torch.finfo(problem.q.dtype).eps * want.abs().max().item() / 2
        for kind, size in (("max", max_of), ("rms", rms_of)):
            bound = 2 * size(allowed) + floor
            assert size(error) <= bound, (
                f"{name}: {kind} error {size(error):.3g}, allowed {bound:.3g}"
            )


def max_of(x: Tensor) -> float:
    """Largest absolute value."""
    return x.abs().max().item() if x.numel() else 0.0


def rms_of(x: Tensor) -> float:
    """Root mean square."""
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor], what: str) -> None:
    """Compare bit patterns; a failure names the first coordinate, both values and the count."""
    for name, a in first.items():
        difference = find_bit_difference(name, a, second[name])
        assert difference is None, f"{what}: {difference}"
