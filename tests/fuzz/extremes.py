"""Random attention problems with extreme values, compared with float64 under an error bound.

    python -m tests.fuzz.extremes [--seconds 300] [--cases 5000] [--seed 0] [--jobs 4]

Scores reach 1e4, factors on them 1e-3 to 1e3, soft caps 1e-3 to 2^40, sinks infinity; some inputs
hold an infinity or NaN. The error of the formula in 16 bits is no measure for such problems, so the
bound comes from the roundings. Let A be the largest value of the same formula with absolute values,
u = 2^-11 (2^-8 in bfloat16, 2^-22 in float32) and

    e = 2^-20 (4 + the largest sum of |q| |k| * scale + the largest ALiBi term) + the cap's error,

where the cap's error is 2^-21 of a cap up to 100, and 2^-20 of the largest score for larger caps.
The allowed errors are

    lse        e + 2^-20 |lse|
    out, dv    (2 e + 3 u) A + what float16 leaves out below 2^-14
    dq, dk     (3 e + 4 u + d) A + likewise

where d = 2^-18 (8 + |lse| + the ALiBi term) / cap, at most 1: general kernels take tanh from lse.

Where float64 is finite, a result must be finite, too (up to 6e4 in float16). The batch entry and
the heads with an infinity or NaN in their inputs are exempt. There, a row with a visible score of
NaN or +infinity must not be finite: no such input may vanish. Masked infinities and NaN may spread,
since 0 times such a number is NaN.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from flash_dist import flash_attn_with_kvcache
from tests.fuzz.shares import (
    DTYPES,
    Checked,
    add_options,
    choose_dtypes,
    digest_of,
    run_program,
    same_bits,
)
from tests.gpu.running import attend_scored, workspace
from tests.reference import random_problem
from tests.scores import Scored, compute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.reference import Problem

Tensor = torch.Tensor
LONGEST: Final = 400
LARGEST: Final = 6e4  # largest finite result in float16
CAPS: Final = (0.0, 1e-3, 0.1, 3.0, 30.0, 50.0, 100.0, 101.0, 1e3, 1e4, 1e6, 1e9, 2.0**40)
PLANTED: Final = (math.inf, -math.inf, math.nan)
UNITS: Final = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-22}


@dataclass(frozen=True)
class Case:
    """One random problem, derived from its number alone."""

    number: int
    dtype: str
    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    causal: bool
    largest_score: float  # approximate
    softmax_scale: float
    softcap: float
    slopes: float  # largest slope; 0: no ALiBi
    sinks: tuple[float, ...]
    gradient: float  # standard deviation of dout
    planted: tuple[str, float] | None  # the tensor that gets a special value, and the value
    megabytes: int

    def __str__(self) -> str:
        return f"case {self.number}: {self!r}"


def draw_case(number: int, *, seed: int = 0, dtypes: Sequence[str] = tuple(DTYPES)) -> Case:
    """Return a case; equal for equal arguments."""
    chance = random.Random(f"extreme {seed} {number}")  # noqa: S311 - no secret
    dtype = chance.choice(dtypes)
    heads_kv = chance.randint(1, 2)
    heads = heads_kv * chance.choice((1, 2, 4))
    sinks = tuple(
        chance.choice((0.0, 1.0, -3.0, 50.0, 1e4, -1e4, math.inf, -math.inf)) for _ in range(heads)
    )
    return Case(
        number,
        dtype,
        batch=chance.randint(1, 2),
        seqlen_q=_draw_length(chance),
        seqlen_k=_draw_length(chance),
        num_heads=heads,
        num_heads_kv=heads_kv,
        head_dim=chance.choice((32, 64, 64, 80, 96, 128, 128, 192, 256)),
        causal=chance.random() < 0.5,
        largest_score=10.0 ** chance.uniform(-1.0, 4.0),
        softmax_scale=10.0 ** chance.uniform(-3.0, 3.0),
        softcap=chance.choice(CAPS),
        slopes=chance.choice((0.0, 0.0, 1e-3, 0.5, 10.0)),
        sinks=sinks if chance.random() < 0.4 else (),
        gradient=10.0 ** chance.uniform(-3.0, 4.0 if dtype != "bf16" else 6.0),
        planted=(chance.choice("qkv"), chance.choice(PLANTED)) if chance.random() < 0.2 else None,
        megabytes=chance.choice((0, 1024)),
    )


def _draw_length(chance: random.Random) -> int:
    return int(math.exp(chance.uniform(0.0, math.log(LONGEST))))


def make(case: Case, *, device: str, seed: int) -> Scored:
    """Return the tensors of a case."""
    problem = random_problem(
        batch=case.batch,
        seqlen_q=case.seqlen_q,
        seqlen_k=case.seqlen_k,
        num_heads=case.num_heads,
        num_heads_kv=case.num_heads_kv,
        head_dim=case.head_dim,
        dtype=torch.float32,
        causal=case.causal,
        device=device,
        seed=seed * 1_000_003 + case.number,
    )
    dtype = DTYPES[case.dtype]
    # q . k of unit normal inputs is at most about 4 sqrt(head_dim).
    size = math.sqrt(case.largest_score / case.softmax_scale / (4.0 * math.sqrt(case.head_dim)))
    q, k = (x * min(size, 1e4) for x in (problem.q, problem.k))
    v, dout = problem.v, problem.dout * case.gradient
    tensors = {"q": q, "k": k, "v": v}
    if case.planted:
        name, value = case.planted
        tensors[name].view(-1)[case.number * 7919 % tensors[name].numel()] = value
    rows = (case.batch, case.num_heads, case.seqlen_q)
    generator = torch.Generator(device).manual_seed(case.number)
    dlse = torch.randn(*rows, generator=generator, device=device) * min(case.gradient, 10.0)
    if problem.visible is not None and not case.sinks:
        dlse = dlse * problem.visible.any(-1)
    problem = replace(
        problem,
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        dout=dout.to(dtype),
        dlse=dlse,
        softmax_scale=case.softmax_scale,
    )
    slopes = torch.linspace(1.0, 0.1, case.num_heads, device=device) * case.slopes
    sinks = torch.tensor(case.sinks, device=device) if case.sinks else None
    return Scored(problem, case.softcap, slopes if case.slopes else None, sinks, "extreme")


def run_case(case: Case, *, device: str, seed: int) -> Checked:
    """Run a case and describe its errors."""
    scored = make(case, device=device, seed=seed)
    with workspace(case.megabytes):
        results = [attend_scored(scored, poison=poison) for poison in (True, False)]
    first, again = results
    differing = [name for name, x in first.items() if not same_bits(x, again[name])]
    found = [f"other bits in another run: {', '.join(differing)}"] * bool(differing)
    first.pop("dsinks", None)  # only ours has a gradient of infinite sinks
    exact = compute(scored, torch.float64)
    found += find_faults(first, exact, scored)
    lost = _rows_that_cannot_be_finite(scored)
    found += [
        f"{name} is finite in a row that sees NaN or +infinity"
        for name in ("out", "lse", "dq")
        if bool(_by_head(name, first[name])[lost].isfinite().any())
    ]
    if scored.problem.q.dtype != torch.float32 and device != "cpu":
        found += find_faults(_read_cache(scored), exact, scored)
    return Checked(found, digest_of(first.values()))


def _read_cache(scored: Scored) -> dict[str, Tensor]:
    """Return out and lse of the same problem with its keys as a cache."""
    problem = scored.problem
    asked: dict[str, Any] = {**scored.options, "s_aux": scored.sinks}
    out, lse = flash_attn_with_kvcache(
        problem.q,
        problem.k,
        problem.v,
        softmax_scale=problem.scale,
        causal=problem.visible is not None,
        return_softmax_lse=True,
        **asked,
    )
    return {"out": out, "lse": lse}


def find_faults(
    got: Mapping[str, Tensor], exact: Mapping[str, Tensor], scored: Scored
) -> list[str]:
    """Name the results that exceed the module's bounds, or that are finite but must not be."""
    bounds = _bounds(scored, exact["lse"])
    found = []
    for name, x in got.items():
        want = exact[name]
        finite = want.isfinite() & _is_clean(name, want, scored.problem)
        if x.dtype == torch.float16:
            finite &= want.abs() <= LARGEST
        if not bool(x.isfinite()[finite].all()):
            count = int((~x.isfinite() & finite).sum())
            found.append(f"{name} is not finite where float64 is, {count} times")
            continue
        error = (x.double() - want)[finite].abs()
        worst = float(error.max()) if error.numel() else 0.0
        if not worst <= bounds[name]:
            found.append(f"{name} is off by {worst:.3g}, allowed {bounds[name]:.3g}")
    return found


def _by_head(name: str, x: Tensor) -> Tensor:
    """Return a result as [batch, heads, tokens] or [batch, heads, tokens, columns]."""
    return x if name == "lse" else x.transpose(1, 2)


def _is_clean(name: str, like: Tensor, problem: Problem) -> Tensor:
    """Return True where the inputs of a batch entry and kv head hold no infinity or NaN."""
    groups = problem.k.shape[2]
    held = (problem.q.unflatten(2, (groups, -1)).flatten(3), problem.k, problem.v)
    clean = torch.stack([x.isfinite().all(-1).all(1) for x in held]).all(0)  # [batch, groups]
    shown = _by_head(name, torch.ones_like(like).bool()).unflatten(1, (groups, -1))
    shown &= clean.reshape(*clean.shape, *(1,) * (shown.dim() - 2))
    return _by_head(name, shown.flatten(1, 2))


def _rows_that_cannot_be_finite(scored: Scored) -> Tensor:
    """Return booleans [batch, num_heads, seqlen_q]: whether a visible score is NaN or +infinity."""
    problem = scored.problem
    s = _products(problem.q.double(), problem.k.double()) * problem.scale
    bad = s.isnan() if scored.softcap else s.isnan() | (s == torch.inf)
    if problem.visible is not None:
        bad &= problem.visible
    lost: Tensor = bad.any(-1)
    if scored.sinks is not None:  # an infinite sink takes all weight from the keys
        lost &= ~(scored.sinks == torch.inf)[None, :, None] | s.isnan().any(-1)
    return lost


def _products(q: Tensor, k: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return torch.einsum("bihd,bjhd->bhij", q, k)


def _bounds(scored: Scored, lse: Tensor) -> dict[str, float]:
    """Return the error bounds of the results; see the module."""
    problem, cap = scored.problem, scored.softcap
    q, k, v, dout = (
        x.double().nan_to_num(0.0, 0.0, 0.0)
        for x in (problem.q, problem.k, problem.v, problem.dout)
    )
    heads = q.shape[2]
    s = _products(q, k) * problem.scale
    terms = float((_products(q.abs(), k.abs()) * problem.scale).max())
    if cap:
        s = cap * torch.tanh(s / cap)
    coarse = (2.0**-21 * cap if cap <= 100.0 else 2.0**-20 * float(s.abs().max())) if cap else 0.0
    ramp = 0.0
    if scored.alibi_slopes is not None:
        rows = torch.arange(q.shape[1], device=q.device) + k.shape[1] - q.shape[1]
        distance = (rows[:, None] - torch.arange(k.shape[1], device=q.device)).abs().double()
        lowered = scored.alibi_slopes.double()[:, None, None] * distance
        s, ramp = s - lowered, float(lowered.abs().max())
    if problem.visible is not None:
        s = s.masked_fill(~problem.visible, -torch.inf)
    e = 2.0**-20 * (4.0 + terms + ramp) + coarse
    ends = s.logsumexp(-1, keepdim=True)
    if scored.sinks is not None:
        ends = torch.logaddexp(ends, scored.sinks.double()[None, :, None, None])
    p = (s - ends).exp().nan_to_num(0.0, 0.0, 0.0)
    group = heads // k.shape[2]
    v, k = v.repeat_interleave(group, 2).abs(), k.repeat_interleave(group, 2).abs()
    q, dout = q.abs(), dout.abs()
    dp = torch.einsum("bihd,bjhd->bhij", dout, v)
    assert problem.dlse is not None
    delta = (p * dp).sum(-1, keepdim=True) + problem.dlse.double().abs()[..., None]
    ds = p * (dp + delta) * problem.scale
    sizes = {
        "out": torch.einsum("bhij,bjhd->bihd", p, v),
        "dq": torch.einsum("bhij,bjhd->bihd", ds, k),
        "dk": torch.einsum("bhij,bihd->bjhd", ds, q).unflatten(2, (-1, group)).sum(3),
        "dv": torch.einsum("bhij,bihd->bjhd", p, dout).unflatten(2, (-1, group)).sum(3),
    }
    known = lse[lse.isfinite()]
    largest_lse = float(known.abs().max()) if known.numel() else 0.0
    unit = UNITS[problem.q.dtype]
    tanh = min(1.0, 2.0**-18 * (8.0 + largest_lse + ramp) / cap) if cap else 0.0
    share = {"out": 2 * e + 3 * unit, "dv": 2 * e + 3 * unit}
    share["dq"] = share["dk"] = 3 * e + 4 * unit + tanh
    floor = 2.0**-24 if problem.q.dtype == torch.float16 else 2.0**-40
    left = {  # errors of rounding: of weights, and 8 times as much of dS
        "out": floor * float(v.sum(1).max()),
        "dv": floor * float(dout.sum(1).max()) * group,
        "dq": 8 * floor * problem.scale * float(k.sum(1).max()),
        "dk": 8 * floor * problem.scale * float(q.sum(1).max()) * group,
    }
    bounds = {
        name: share[name] * float(size.max()) + left[name] + 2.0**-24
        for name, size in sizes.items()
    }
    return {**bounds, "lse": e + 2.0**-20 * largest_lse}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="extreme attention problems against float64")
    add_options(parser, cases=5_000)
    args = parser.parse_args(arguments)
    draw = partial(draw_case, seed=args.seed, dtypes=choose_dtypes(args))
    return run_program(args, draw, partial(run_case, device=args.device, seed=args.seed))


if __name__ == "__main__":
    sys.exit(main())
