"""Calls with softcap, ALiBi, sinks and bias, and their reference: the formula in float64.

The formula is written for torch's autograd, so that it contains no derivative of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from tests.reference import FP32_ERROR, MARGIN, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

Tensor = torch.Tensor
NAMES: Final = ("out", "lse", "dq", "dk", "dv")
Documents = tuple[tuple[int, ...], tuple[int, ...]]  # lengths of queries and of keys
MASKED: Final = -65504.0  # a bias of this or less masks a key
SOFTCAP: Final = 3.0  # small, so that scores reach it


@dataclass(frozen=True)
class Scored:
    """A problem and its score modifications."""

    problem: Problem
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # [num_heads_q] or [batch or documents, num_heads_q]
    sinks: Tensor | None = None  # [num_heads_q]
    name: str = ""
    documents: Documents | None = None  # packed into a batch of 1
    bias: Tensor | None = None  # [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k]

    def __str__(self) -> str:
        return f"{self.name} of {self.problem}"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the product, except those with a gradient."""
        return {"softcap": self.softcap, "alibi_slopes": self.alibi_slopes}

    @property
    def learned(self) -> dict[str, Tensor]:
        """Arguments with a gradient, by name; the gradient of `sinks` is called `dsinks`."""
        given = {"sinks": self.sinks, "bias": self.bias}
        return {name: x for name, x in given.items() if x is not None}


def score(
    problem: Problem, features: str, seed: int = 0, documents: Documents | None = None
) -> Scored:
    """Return the problem with the named ones of softcap, alibi, alibi-batch and sinks.

    lse gets a gradient, too.
    """
    heads, batch = problem.q[0, 0, ..., 0].numel(), problem.q.shape[0]
    sequences = len(documents[0]) if documents else batch
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cpu").to(problem.q.device)

    slopes = None
    if "alibi" in features:
        slopes = draw(sequences, heads).abs() if "alibi-batch" in features else draw(heads).abs()
    dlse = 0.3 * draw(batch, heads, problem.q.shape[1])
    if problem.visible is not None and "sinks" not in features:
        dlse = dlse * problem.visible.any(-1)
    return Scored(
        replace(problem, dlse=dlse),
        SOFTCAP if "softcap" in features else 0.0,
        slopes,
        2.0 * draw(heads) if "sinks" in features else None,
        features,
        documents,
    )


def compute(scored: Scored, dtype: torch.dtype) -> dict[str, Tensor]:
    """Compute all results by the formula in a dtype, differentiated by torch."""
    problem = scored.problem
    leaves = [x.detach().to(dtype).requires_grad_() for x in (problem.q, problem.k, problem.v)]
    learned = {x: y.detach().to(dtype).requires_grad_() for x, y in scored.learned.items()}
    out, lse = _formula(scored, *leaves, **learned)
    lse_or_zero = torch.where(lse.isfinite(), lse, 0.0)
    assert problem.dlse is not None
    loss = [(out * problem.dout.to(dtype)).sum(), (lse_or_zero * problem.dlse.to(dtype)).sum()]
    grads = torch.autograd.grad(loss, [*leaves, *learned.values()])
    names = *NAMES, *(f"d{name}" for name in learned)
    return dict(zip(names, (out.detach(), lse.detach(), *grads), strict=True))


def _formula(  # noqa: PLR0913 - what is differentiated
    scored: Scored,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    problem, dtype = scored.problem, q.dtype
    q = q.flatten(2, -2)
    batch, seqlen_q, heads, _ = q.shape
    seqlen_k = k.shape[1]
    k, v = (x.repeat_interleave(heads // k.shape[2], dim=2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * problem.scale
    if scored.softcap:
        wide = (
            s.double() if dtype == torch.float64 else s.float()
        )  # 16-bit dtypes lose tanh of a large cap
        s = (scored.softcap * torch.tanh(wide / scored.softcap)).to(dtype)
    if scored.alibi_slopes is not None:
        s = s - _slopes_by_row(scored, heads).to(dtype) * _distances(scored).to(dtype)
    if bias is not None:
        s = torch.where(bias <= MASKED, -torch.inf, s + bias)
    if problem.visible is not None:
        s = s.masked_fill(~problem.visible, -torch.inf)
    if sinks is not None:
        s = torch.cat((s, sinks[None, :, None, None].expand(batch, heads, seqlen_q, 1)), -1)
    lse = s.logsumexp(-1)
    shift = torch.where(lse.isfinite(), lse, 0.0)[..., None]
    p = (s - shift).exp()[..., :seqlen_k]
    p = p.masked_fill(lse[..., None] == torch.inf, 0.0)  # a sink of +inf takes all weight
    out = torch.einsum("bhij,bjhd->bihd", p, v)
    return out.reshape(*problem.q.shape[:-1], v.shape[-1]), lse


def _slopes_by_row(scored: Scored, heads: int) -> Tensor:
    """Return [batch, heads, 1, 1], or for documents [1, heads, seqlen_q, 1]."""
    slopes, problem = scored.alibi_slopes, scored.problem
    assert slopes is not None
    if scored.documents is None:
        return slopes.expand(problem.q.shape[0], heads)[:, :, None, None]
    lengths, _ = scored.documents
    rows = torch.tensor(lengths, device=slopes.device)
    return slopes.expand(len(lengths), heads).repeat_interleave(rows, 0).T[None, :, :, None]


def _distances(scored: Scored) -> Tensor:
    """Return [seqlen_q, seqlen_k]; for documents from the bottom right of each."""
    q, k = scored.problem.q, scored.problem.k
    lengths_q, lengths_k = scored.documents or ((q.shape[1],), (k.shape[1],))

    def count(begin: int, length: int) -> Tensor:
        return torch.arange(begin, begin + length, device=q.device)

    pairs = zip(lengths_q, lengths_k, strict=True)
    i = torch.cat([count(keys - queries, queries) for queries, keys in pairs])
    j = torch.cat([count(0, keys) for keys in lengths_k])
    return (i[:, None] - j).abs()


def of_rounded_out(name: str, out: Tensor, scored: Scored) -> float:
    """Return the allowed error from computing delta with the rounded `out`.

    The formula uses out with all its bits. The sinks' gradient is a multiple of delta; with one key
    beside a sink dq and dk are, too: dP - delta is then a difference of two close numbers.
    """
    problem = scored.problem
    rounding = torch.finfo(problem.q.dtype).eps * float(
        (problem.dout.double() * out).norm(dim=-1).max()
    )
    rows = problem.q.shape[0] * problem.q.shape[1]
    if name in {"dsinks", "dbias"}:
        heads = problem.q[0, 0, ..., 0].numel() if name == "dbias" else 1
        return float(rounding * (rows * heads) ** 0.5)
    fewest = min(scored.documents[1]) if scored.documents else problem.k.shape[1]
    if name not in {"dq", "dk"} or fewest > 1:
        return 0.0
    other = problem.k if name == "dq" else problem.q
    return float(rounding * problem.scale * float(other.abs().max()) * rows**0.5)


def find_faults(actual: Mapping[str, Tensor], scored: Scored) -> list[str]:
    """Name the results whose float64 error exceeds twice the formula's own in the dtype.

    In float32 it adds `tests.reference.bound_single` of a score.
    """
    exact, half = compute(scored, torch.float64), compute(scored, scored.problem.q.dtype)
    single = scored.problem.q.dtype == torch.float32
    largest = float(exact["lse"].nan_to_num(0.0, 0.0, 0.0).abs().max())
    found = []
    for name, got in actual.items():
        want = exact[name]
        assert got.shape == want.shape, f"{name} has shape {list(got.shape)}: {scored}"
        finite = want.isfinite()
        if not bool((got.isfinite() == finite).all()):
            found.append(f"{scored}: {name} is finite where it should not be, or not")
            continue
        zero = torch.zeros_like(want)
        size = float(torch.where(finite, want, zero).abs().max()) + 1.0
        error = float(torch.where(finite, got.double() - want, zero).abs().max())
        base = float(torch.where(finite, half[name].double() - want, zero).abs().max())
        unit = FP32_ERROR * (8 + largest) if single else torch.finfo(got.dtype).eps / 2
        unit = 1e-4 if name in {"lse", "dsinks", "dbias"} and not single else unit
        terms = 8.0 if single else 1.0
        if name in {"dsinks", "dbias"}:  # a sum over rows
            terms *= (exact["lse"].numel() / want.numel()) ** 0.5
        allowed = MARGIN * base + unit * size * terms
        if not single:
            allowed += of_rounded_out(name, exact["out"], scored)
        if not error <= allowed:
            found.append(f"{scored}: {name} is off by {error:.3g}, allowed {allowed:.3g}")
    return found
