"""Calls with softcap, ALiBi, sinks, bias and dropout, and the formula in float64.

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
MAX_LOGIT_ERROR: Final = 4e-6  # relative to 1 + the largest sum of terms of a score


@dataclass(frozen=True)
class Scored:
    """A problem and its score modifications."""

    problem: Problem
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None  # [num_heads_q] or [batch or documents, num_heads_q]
    sinks: Tensor | None = None  # [num_heads_q]
    name: str = ""
    documents: Documents | None = None  # packed into a batch of 1
    # Broadcasts to [batch, num_heads_q, seqlen_q, seqlen_k]; with documents, to [1, num_heads_q,
    # queries, keys] of the longest ones, or more.
    bias: Tensor | None = None
    dropout_p: float = 0.0  # a multiple of 1 / 65536
    dropped: Tensor | None = None  # [batch, num_heads_q, seqlen_q, seqlen_k], True: dropped

    def __str__(self) -> str:
        return f"{self.name} of {self.problem}"

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the tested function, except those with a gradient."""
        options = {"softcap": self.softcap, "alibi_slopes": self.alibi_slopes}
        return {**options, "dropout_p": self.dropout_p} if self.dropout_p else options

    @property
    def learned(self) -> dict[str, Tensor]:
        """Arguments with a gradient, by name; the gradient of `sinks` is called `dsinks`."""
        given = {"sinks": self.sinks, "bias": self.bias}
        return {name: x for name, x in given.items() if x is not None}


def score(
    problem: Problem, features: str, seed: int = 0, documents: Documents | None = None
) -> Scored:
    """Return the problem with the named features: softcap, alibi, alibi-batch and sinks.

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
    problem = scored.problem
    p, lse = _weigh(scored, q, k, sinks=sinks, bias=bias)
    if scored.dropped is not None:
        p = p.masked_fill(scored.dropped, 0.0) / (1.0 - scored.dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", p, _repeat(v, p.shape[1]))
    return out.reshape(*problem.q.shape[:-1], v.shape[-1]), lse


def _weigh(
    scored: Scored, q: Tensor, k: Tensor, *, sinks: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the weights, [batch, heads, queries, keys], and lse."""
    s = _find_scores(scored, q, k, bias)
    batch, heads, seqlen_q, seqlen_k = s.shape
    if sinks is not None:
        s = torch.cat((s, sinks[None, :, None, None].expand(batch, heads, seqlen_q, 1)), -1)
    lse = s.logsumexp(-1)
    shift = torch.where(lse.isfinite(), lse, 0.0)[..., None]
    p = (s - shift).exp()[..., :seqlen_k]
    return p.masked_fill(lse[..., None] == torch.inf, 0.0), lse  # a sink of +inf takes all weight


def _repeat(x: Tensor, heads: int) -> Tensor:
    """Repeat the kv heads of [batch, keys, num_heads_kv, head_dim] to `heads` heads."""
    return x.repeat_interleave(heads // x.shape[2], dim=2)


def _multiply(q: Tensor, k: Tensor) -> Tensor:
    """Return q @ k.T, [batch, heads, queries, keys]."""
    q = q.flatten(2, -2)
    return torch.einsum("bihd,bjhd->bhij", q, _repeat(k, q.shape[2]))


def _find_scores(scored: Scored, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    """Return the scores after softcap, ALiBi, bias and mask, [batch, heads, queries, keys]."""
    problem, dtype = scored.problem, q.dtype
    s = _multiply(q, k) * problem.scale
    if scored.softcap:
        wide = (
            s.double() if dtype == torch.float64 else s.float()
        )  # 16-bit dtypes lose tanh of a large cap
        s = (scored.softcap * torch.tanh(wide / scored.softcap)).to(dtype)
    if scored.alibi_slopes is not None:
        s = s - _slopes_by_row(scored, s.shape[1]).to(dtype) * _distances(scored).to(dtype)
    if bias is not None:
        bias = lay_out(scored, bias)
        s = torch.where(bias <= MASKED, -torch.inf, s + bias)
    if problem.visible is not None:
        s = s.masked_fill(~problem.visible, -torch.inf)
    return s


def lay_out(scored: Scored, bias: Tensor) -> Tensor:
    """Return a bias that broadcasts to all scores, from the numbers of one document if packed."""
    if scored.documents is None:
        return bias
    bias = bias.reshape((1,) * (4 - bias.dim()) + bias.shape)
    rows, columns = (
        torch.cat([torch.arange(n, device=bias.device) for n in lengths]).clamp(max=size - 1)
        for lengths, size in zip(scored.documents, bias.shape[2:], strict=True)
    )
    return bias[..., rows[:, None], columns]


def place(bias: Tensor, begin: int, row: int) -> Tensor:
    """Copy a bias to memory where rows have `row` elements and the first starts at `begin`."""
    numbers = bias.shape[:3].numel() * row
    wide = bias.new_full((begin + numbers,), torch.nan)[begin:].view(*bias.shape[:3], row)
    return wide[..., : bias.shape[3]].copy_(bias)


def _slopes_by_row(scored: Scored, heads: int) -> Tensor:
    """Return the slopes [batch, heads, 1, 1], or for documents [1, heads, seqlen_q, 1]."""
    slopes, problem = scored.alibi_slopes, scored.problem
    assert slopes is not None
    if scored.documents is None:
        return slopes.expand(problem.q.shape[0], heads)[:, :, None, None]
    lengths, _ = scored.documents
    rows = torch.tensor(lengths, device=slopes.device)
    return slopes.expand(len(lengths), heads).repeat_interleave(rows, 0).T[None, :, :, None]


def _distances(scored: Scored) -> Tensor:
    """Return the distances [seqlen_q, seqlen_k], from the bottom right of each document."""
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
    beside a sink, dq and dk are multiples of delta, too: dP - delta is then a difference of two
    close numbers.
    """
    problem = scored.problem
    rounding = torch.finfo(problem.q.dtype).eps * float(
        (problem.dout.double() * out).norm(dim=-1).max()
    )
    rows = problem.q.shape[0] * problem.q.shape[1]
    if name == "dsinks":
        return float(rounding * rows**0.5)
    if name == "dbias":
        return float(2 * rounding * _rows_of_an_entry(scored) ** 0.5)
    fewest = min(scored.documents[1]) if scored.documents else problem.k.shape[1]
    if name not in {"dq", "dk"} or fewest > 1:
        return 0.0
    other = problem.k if name == "dq" else problem.q
    return float(rounding * problem.scale * float(other.abs().max()) * rows**0.5)


def of_delta(out: Tensor, scored: Scored) -> dict[str, float]:
    """Return the allowed errors of dq and dk from computing delta with the rounded `out`.

    These errors matter if dP and delta cancel: with few visible keys, or large kept weights of
    dropout; see `tests.reference.bound_delta`.
    """
    problem = scored.problem
    k, p = problem.k.double(), _weigh_exactly(scored)
    q = problem.q.double().flatten(2, -2)
    rounding = (problem.dout.double() * out).norm(dim=-1).reshape(q.shape[:3])
    rounding = rounding * torch.finfo(problem.q.dtype).eps * 2  # 7 standard deviations
    dq = torch.einsum("bhij,bjhd->bihd", p, _repeat(k, p.shape[1])) * rounding[..., None]
    squares = (q * rounding[..., None]).square()
    dk = _sum_groups(torch.einsum("bhij,bihd->bjhd", p.square(), squares), k).sqrt()
    return {name: float(x.abs().max()) * problem.scale for name, x in (("dq", dq), ("dk", dk))}


def of_weights(scored: Scored) -> dict[str, float]:
    """Return the allowed errors of out and dv from rounding P: `tests.reference.bound_weights`."""
    problem, p = scored.problem, _weigh_exactly(scored)
    v, dout = problem.v.double(), problem.dout.double().flatten(2, -2)
    error = torch.finfo(problem.q.dtype).eps * 1.5  # 5 standard deviations
    cut = (p * (error / (1.0 - scored.dropout_p))).square()
    out = torch.einsum("bhij,bjhd->bihd", cut, _repeat(v, p.shape[1]).square())
    dv = _sum_groups(torch.einsum("bhij,bihd->bjhd", cut, dout.square()), v)
    return {name: float(x.max()) ** 0.5 for name, x in (("out", out), ("dv", dv))}


def size_terms(scored: Scored) -> dict[str, float]:
    """Return the largest sums of the absolute values of the terms of dq, dk and dbias.

    An error in float32 is a fraction of such a sum, also if dP and delta cancel; see
    `tests.reference.bound_single`.
    """
    problem, p = scored.problem, _weigh_exactly(scored)
    q, k, v, dout = (x.double().abs() for x in (problem.q, problem.k, problem.v, problem.dout))
    q, dout = q.flatten(2, -2), dout.flatten(2, -2)
    dp, out = _multiply(dout, v), torch.einsum("bhij,bjhd->bihd", p, _repeat(v, p.shape[1]))
    delta = (dout * out).sum(-1).mT / (1.0 - scored.dropout_p)
    if problem.dlse is not None:
        delta = delta + problem.dlse.abs()
    ds = p * (dp / (1.0 - scored.dropout_p) + delta[..., None])
    dq = torch.einsum("bhij,bjhd->bihd", ds, _repeat(k, p.shape[1])) * problem.scale
    dk = _sum_groups(torch.einsum("bhij,bihd->bjhd", ds, q), k) * problem.scale
    terms = {"dq": dq, "dk": dk}
    if scored.bias is not None:
        leaf = torch.zeros_like(scored.bias, dtype=ds.dtype).requires_grad_()
        full = lay_out(scored, leaf).expand(ds.shape)
        terms["dbias"] = torch.autograd.grad(full, leaf, ds)[0]
    return {name: float(x.max()) for name, x in terms.items()}


def _weigh_exactly(scored: Scored) -> Tensor:
    learned = {name: x.double() for name, x in scored.learned.items()}
    problem = scored.problem
    given = {"sinks": None, "bias": None, **learned}
    return _weigh(scored, problem.q.double(), problem.k.double(), **given)[0]


def _sum_groups(x: Tensor, like: Tensor) -> Tensor:
    """Sum [batch, keys, heads, head_dim] over the query heads of each kv head."""
    grouped: Tensor = x.unflatten(2, (like.shape[2], -1))
    return grouped.sum(3)


def find_faults(actual: Mapping[str, Tensor], scored: Scored) -> list[str]:
    """Name the results whose float64 error exceeds twice the formula's own in the dtype.

    In float32 the allowed error also contains `tests.reference.bound_single` of a score.
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
        if name == "dsinks":  # a sum over rows
            terms *= (exact["lse"].numel() / want.numel()) ** 0.5
        if name == "dbias":  # also a sum over rows; its dtype may have fewer bits
            terms *= _rows_of_an_entry(scored) ** 0.5
            unit = max(unit, torch.finfo(got.dtype).eps / 2)
        allowed = MARGIN * base + unit * size * terms
        if not single:
            allowed += of_rounded_out(name, exact["out"], scored)
        if not error <= allowed:  # rarely needed, and expensive
            more = size_terms(scored) if single else of_weights(scored)
            more |= {} if single else of_delta(exact["out"], scored)
            allowed += more.get(name, 0.0) * (FP32_ERROR * (8 + largest) if single else 1.0)
        if not error <= allowed:
            found.append(f"{scored}: {name} is off by {error:.3g}, allowed {allowed:.3g}")
    return found


def _rows_of_an_entry(scored: Scored) -> float:
    """Return how many rows the gradient of an entry of the bias is summed over."""
    q, bias = scored.problem.q, scored.bias
    assert bias is not None
    keys = bias.shape[-1] if bias.dim() else 1
    if scored.documents is None:
        return q[..., 0].numel() * keys / bias.numel()
    return q[0, 0, ..., 0].numel() * sum(scored.documents[0])  # at most


def find_wrong_max_logit(actual: Tensor, scored: Scored) -> list[str]:
    """Name max_logit if it is not near the largest score of each head in float64.

    The allowed error is a fraction of the largest sum of a score's terms, all taken positive.
    """
    problem = scored.problem
    q, k = problem.q.double(), problem.k.double()
    bias = None if scored.bias is None else scored.bias.double()
    scores = _find_scores(scored, q, k, bias)
    want = scores.amax((0, 2, 3))
    terms = _multiply(q.abs(), k.abs()) * problem.scale
    if scored.alibi_slopes is not None:
        terms = terms + _slopes_by_row(scored, terms.shape[1]) * _distances(scored)
    if bias is not None:
        terms = terms + lay_out(scored, bias).abs()
    largest = terms.masked_fill(scores == -torch.inf, 0.0).amax((0, 2, 3))
    if not torch.equal(actual.isfinite(), want.isfinite()):
        return [f"{scored}: max_logit is finite where it should not be, or not"]
    error = torch.where(want.isfinite(), actual - want, 0.0).abs()
    found = error > MAX_LOGIT_ERROR * (1 + largest)
    if not bool(found.any()):
        return []
    return [f"{scored}: max_logit is off by {float(error.max()):.3g}: {actual.tolist()}"]
