"""Random attention problems compared with float64, run three times, and once in poisoned memory.

    python -m tests.fuzz.attention [--seconds 300] [--cases 5000] [--seed 0] [--jobs 4] [--only-new]
    python -m tests.fuzz.attention --bits-only --longest 5000 --jobs 4 [--bits FILE]

The program needs an installed flash_dist; `--device cpu` tests the program itself. A case has a
random dtype, shape, head_dim, memory layout, mask (or packed documents), workspace budget and
magnitude (or softcap, ALiBi and sinks, at magnitude 1), and a default device of torch other than
that of its tensors. Half of the cases, or all with `--only-new`, also have a bias, dropout,
return_max_logit, or in 16 bits a head_dim above 256. The same seed gives the same cases. The
allowed error is that of tests.reference (tests.scores if scores are modified): twice the error of
the same formula in torch with the same inputs. Exit status 1 after a finding; every finding names
its case, and `--only NUMBER` runs that one alone.

A case that has not ended after `--patience` seconds hangs. Its process then names the case and
prints the stacks of its threads. The process ends, and the program ends, too. `--bits-only` skips
float64, so that cases can be long and many. Together with other work on the GPU, this option tests
kernels whose blocks wait for each other. `--bits` writes a digest of each case's results to a new
file, or compares the results with an existing file. The second run may use kernels that were built
with delays (docs/debugging.md).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from flash_dist import dropout_mask
from tests import scores
from tests.fuzz.biases import draw_bias
from tests.fuzz.shares import (
    DTYPES,
    Checked,
    add_options,
    choose_dtypes,
    digest_of,
    run_program,
    same_bits,
)
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, attend_scored, workspace
from tests.masks import MASKS, Sizes, show
from tests.reference import Problem, find_faults, random_problem
from tests.scores import MASKED, Scored, find_wrong_max_logit, lay_out, score

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.fuzz.biases import Bias
    from tests.gpu.packed import Packed

Tensor = torch.Tensor
DEFAULT_DEVICES: Final = (None, "meta", "cuda")
BUDGETS: Final = (0, 1, 16, 1024)  # MiB
LONGEST: Final = 900  # tokens
SMALLEST, LARGEST = 1e-3, 30.0  # standard deviations of the inputs
RUNS: Final = 3  # runs that must have equal bits, after one in poisoned memory
_PACKED: Final = ("packed", "packed causal", "packed window")
_FEATURES: Final = (
    *("softcap", "alibi", "alibi-batch", "sinks", "softcap alibi", "softcap sinks"),
    *("alibi-batch sinks", "softcap alibi sinks"),
)
_USUAL_DIMS: Final = (32, 64, 64, 96, 128, 128, 192, 256)
_NEW: Final = (  # newer features, in all combinations that calls support
    *("bias", "dropout", "max_logit", "wide", "bias dropout", "bias max_logit", "bias wide"),
    *("max_logit wide", "bias max_logit wide"),
)
_FRACTIONS: Final = (1, 6554, 16384, 32768, 58982)  # dropped weights of 65536
_WIDE: Final = (257, 512)  # head_dim


@dataclass(frozen=True)
class Case:
    """One random problem, derived from its number alone."""

    number: int
    dtype: str
    mask: str  # name in MASKS, or a mask of documents
    lengths: tuple[int, ...]  # lengths of documents; a single length: no documents
    lengths_k: tuple[int, ...]
    batch: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    layout: str  # name in LAYOUTS
    magnitudes: tuple[float, float, float, float]  # of q, k, v, dout
    softmax_scale: float | None
    default_device: str | None
    megabytes: int
    batch_invariant: bool
    with_dlse: bool
    float32_precision: str | None  # for float32 only
    features: str  # argument of `tests.scores.score`
    bias: Bias | None = None
    dropout_p: float = 0.0
    with_max_logit: bool = False

    def __str__(self) -> str:
        sizes = (
            f"b{self.batch} q{list(self.lengths)} k{list(self.lengths_k)} "
            f"h{self.num_heads}/{self.num_heads_kv} d{self.head_dim}/{self.head_dim_v}"
        )
        magnitudes = "/".join(f"{one:.2g}" for one in self.magnitudes)
        return (
            f"case {self.number}: {self.mask} {self.dtype} {sizes} {self.layout}, magnitudes "
            f"{magnitudes}, scale {self.softmax_scale}, default device {self.default_device}, "
            f"{self.megabytes} MiB, batch_invariant {self.batch_invariant}, dlse {self.with_dlse}, "
            f"float32_precision {self.float32_precision}, scores {self.features or 'plain'}"
            f"{f', {self.bias}' if self.bias else ''}"
            f"{f', dropout {self.dropout_p:g}' if self.dropout_p else ''}"
            f"{', max_logit' if self.with_max_logit else ''}"
        )

    @property
    def is_packed(self) -> bool:
        """Tell if the documents of the case are packed."""
        return self.mask in _PACKED

    @property
    def is_scored(self) -> bool:
        """Tell if tests.scores has the reference of the case."""
        return bool(self.features or self.bias or self.dropout_p)


class New(NamedTuple):
    """How often the newer features are drawn."""

    share: float = 0.5  # of the cases
    wide: bool = True  # a head_dim above 256, too


def draw_case(
    number: int,
    *,
    seed: int = 0,
    dtypes: Sequence[str] = tuple(DTYPES),
    longest: int = LONGEST,
    new: New | None = None,
) -> Case:
    """Return a case of at most `longest` tokens; equal for equal arguments."""
    new = new or New()
    case = _draw_case(number, seed, dtypes, longest)
    chance = random.Random(f"{seed} {number} new")  # noqa: S311 - no secret
    return _add_new(case, chance, wide=new.wide) if chance.random() < new.share else case


def _add_new(case: Case, chance: random.Random, *, wide: bool) -> Case:
    """Return the case with newer features, without options that these features refuse."""
    refused = set()
    if not wide or case.dtype == "fp32":
        refused.add("wide")
    new = chance.choice([one for one in _NEW if not refused & {*one.split()}]).split()
    if "bias" in new:
        case = replace(case, bias=draw_bias(chance))
    if "dropout" in new:
        case = replace(case, dropout_p=chance.choice(_FRACTIONS) / 65536, float32_precision=None)
    if "max_logit" in new:
        case = replace(case, with_max_logit=True)
    if "wide" in new:
        low, high = _WIDE
        head_dim = chance.choice((8 * chance.randint(33, 64), 512, chance.randint(low, high)))
        smaller = chance.random() < 0.3
        case = replace(
            case,
            head_dim=head_dim,
            head_dim_v=chance.randint(1, head_dim) if smaller else head_dim,
        )
    if {"bias", "dropout"} & {*new}:
        features = case.features.replace("softcap", "").strip()
        case = replace(case, features=features, magnitudes=(1.0,) * 4, softmax_scale=None)
    return case


def _draw_case(number: int, seed: int, dtypes: Sequence[str], longest: int) -> Case:
    chance = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
    dtype = chance.choice(dtypes)
    mask = chance.choice((*MASKS, *MASKS, *_PACKED * 4))
    documents = chance.randint(1, 6) if mask in _PACKED else 1
    lengths = tuple(_draw_length(chance, longest) for _ in range(documents))
    same = chance.random() < 0.4
    lengths_k = lengths if same else tuple(_draw_length(chance, longest) for _ in range(documents))
    num_heads_kv = chance.randint(1, 3)
    usual = chance.random() < 0.7
    head_dim = chance.choice(_USUAL_DIMS) if usual else 8 * chance.randint(1, 32)
    smaller = chance.random() < 0.2
    head_dim_v = 8 * chance.randint(1, head_dim // 8) if smaller else head_dim
    case = Case(
        number,
        dtype,
        mask,
        lengths,
        lengths_k,
        batch=1 if mask in _PACKED else chance.randint(1, 3),
        num_heads=num_heads_kv * chance.choice((1, 1, 2, 4, 7)),
        num_heads_kv=num_heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        layout="packed" if mask in _PACKED else chance.choice(tuple(LAYOUTS)),
        magnitudes=_draw_magnitudes(chance, dtype),
        softmax_scale=chance.choice((None, None, chance.uniform(0.01, 0.5))),
        default_device=chance.choice(DEFAULT_DEVICES),
        megabytes=chance.choice(BUDGETS),
        batch_invariant=chance.random() < 0.2,
        with_dlse=chance.random() < 0.3,
        float32_precision=chance.choice((None, None, "ieee")) if dtype == "fp32" else None,
        features="",
    )
    if chance.random() < 0.6:
        return case
    features = chance.choice(_FEATURES)
    return replace(case, features=features, magnitudes=(1.0,) * 4, softmax_scale=None)


def _draw_length(chance: random.Random, longest: int) -> int:
    return int(math.exp(chance.uniform(0.0, math.log(longest))))


def _draw_magnitudes(chance: random.Random, dtype: str) -> tuple[float, float, float, float]:
    """Draw standard deviations; those of gradients stay small enough for the range of float16."""
    low, high = math.log(SMALLEST), math.log(LARGEST)
    q, k, v, dout = (math.exp(chance.uniform(low, high)) for _ in range(4))
    if dtype == "fp16":
        dout = min(dout, 10.0 / max(1.0, v) / max(1.0, q, k))
    return q, k, v, dout


def _contiguous(x: Tensor) -> Tensor:
    return x.contiguous()


def _heads_first(x: Tensor) -> Tensor:
    """Return a view with heads first, as transposed from [batch, heads, seqlen, head_dim]."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _wider(x: Tensor) -> Tensor:
    """Return x as a slice of rows that are 16 elements longer, as in a joint projection."""
    held = x.new_full((*x.shape[:-1], x.shape[-1] + 16), torch.nan)
    held[..., 8:-8] = x
    return held[..., 8:-8]


def _longer(x: Tensor) -> Tensor:
    """Return x as the middle of a longer sequence, as in a cache."""
    held = x.new_full((x.shape[0], x.shape[1] + 5, *x.shape[2:]), torch.nan)
    held[:, 2:-3] = x
    return held[:, 2:-3]


LAYOUTS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "contiguous": _contiguous,
    "heads first": _heads_first,
    "wider": _wider,
    "longer": _longer,
}


def run_case(case: Case, *, device: str, seed: int, bits_only: bool = False) -> Checked:
    """Describe errors of a case: only of its bits, or also of its values."""
    there = None if device == "cpu" and case.default_device == "cuda" else case.default_device
    default = torch.device(there) if there else contextlib.nullcontext()
    with default, workspace(case.megabytes):
        packed = _make_packed(case, device, seed) if case.is_packed else None
        problem = packed.problem if packed else _make_problem(case, device, seed)
        options: dict[str, Any] = {
            "batch_invariant": case.batch_invariant,
            "float32_precision": case.float32_precision,
        }
        scored = _bend(case, problem, seed) if case.is_scored else None

        def run(*, poison: bool, max_logit: bool = case.with_max_logit) -> dict[str, Tensor]:
            options["return_max_logit"] = max_logit
            torch.manual_seed(case.number)  # of dropout
            if packed and scored:
                bent, asked = replace(packed, problem=scored.problem), {**scored.options, **options}
                return attend_packed(
                    bent, poison=poison, sinks=scored.sinks, bias=scored.bias, **asked
                )
            if scored:
                return attend_scored(scored, poison=poison, **options)
            if packed:
                return attend_packed(packed, poison=poison, **options)
            return attend(problem, poison=poison, **options)

        runs = [run(poison=True), *(run(poison=False) for _ in range(RUNS - 1))]
        runs.append(run(poison=False, max_logit=False))  # out and lse keep their bits
    found = [] if bits_only else _find_faults(runs[0], problem, scored)
    for other in runs[1:]:
        differing = [name for name, x in other.items() if not same_bits(x, runs[0][name])]
        if differing:
            found.append(f"other bits in another run: {', '.join(differing)}")
    return Checked(found, digest_of(runs[0].values()))


def _find_faults(result: dict[str, Tensor], problem: Problem, scored: Scored | None) -> list[str]:
    others = {name: x for name, x in result.items() if name != "max_logit"}
    found = scores.find_faults(others, scored) if scored else find_faults(others, problem)
    if "max_logit" in result:
        found += find_wrong_max_logit(result["max_logit"], scored or Scored(problem))
    return found


def _bend(case: Case, problem: Problem, seed: int) -> Scored:
    """Return the problem with the case's modifications of scores, bias and dropout."""
    documents = (case.lengths, case.lengths_k) if case.is_packed else None
    scored = score(problem, case.features, case.number, documents)
    device = str(problem.q.device)
    if case.bias:
        lengths = problem.q.shape[1], problem.k.shape[1]
        if case.is_packed:  # also more queries and keys than a document has
            lengths = max(case.lengths) + case.number % 2, max(case.lengths_k) + case.number % 3
        shape = problem.q.shape[0], case.num_heads, *lengths
        bias = case.bias.make(shape, device, seed * 1_000_003 + case.number)
        seen = lay_out(scored, bias) > MASKED
        seen = seen if problem.visible is None else problem.visible & seen
        dlse = scored.problem.dlse
        assert dlse is not None
        if scored.sinks is None:
            dlse = dlse * seen.any(-1)
        scored = replace(scored, bias=bias, problem=replace(scored.problem, dlse=dlse))
    if case.dropout_p:
        dropped = _find_dropped(case, device)
        scored = replace(scored, dropout_p=case.dropout_p, dropped=dropped)
    return scored


def _find_dropped(case: Case, device: str) -> Tensor:
    """Return which weights the call drops, [batch, num_heads, queries, keys]."""
    torch.manual_seed(case.number)
    sequences = len(case.lengths) if case.is_packed else case.batch
    shape = sequences, case.num_heads, max(case.lengths), max(case.lengths_k)
    dropped = dropout_mask(case.dropout_p, shape, device=device)
    if not case.is_packed:
        return dropped
    packed = dropped.new_zeros(1, case.num_heads, sum(case.lengths), sum(case.lengths_k))
    ends = accumulate(case.lengths), accumulate(case.lengths_k)
    for one, q, k, end_q, end_k in zip(dropped, case.lengths, case.lengths_k, *ends, strict=True):
        packed[0, :, end_q - q : end_q, end_k - k : end_k] = one[:, :q, :k]
    return packed


def _shape(case: Case, device: str, seed: int) -> dict[str, Any]:
    return {
        "num_heads": case.num_heads,
        "num_heads_kv": case.num_heads_kv,
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "dtype": DTYPES[case.dtype],
        "device": device,
        "seed": seed * 1_000_003 + case.number,
    }


def _make_packed(case: Case, device: str, seed: int) -> Packed:
    window = (40, 9) if case.mask.endswith("window") else (-1, -1)
    packed = pack(
        case.lengths,
        case.lengths_k,
        causal=case.mask.endswith("causal"),
        window_size=window,
        **_shape(case, device, seed),
    )
    return replace(packed, problem=_finish(case, packed.problem, _contiguous))


def _make_problem(case: Case, device: str, seed: int) -> Problem:
    (seqlen_q,), (seqlen_k,) = case.lengths, case.lengths_k
    shape: dict[str, Any] = {"batch": case.batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    problem = random_problem(**shape, **_shape(case, device, seed))
    sizes = Sizes(case.batch, case.num_heads, seqlen_q, seqlen_k)
    shown = show.__wrapped__(case.mask, sizes, device)  # repeat with another default device
    problem = replace(problem, visible=shown.visible, options=shown.options, name=case.mask)
    return _finish(case, problem, LAYOUTS[case.layout])


def _finish(case: Case, problem: Problem, layout: Callable[[Tensor], Tensor]) -> Problem:
    tensors = (problem.q, problem.k, problem.v, problem.dout)
    q, k, v, dout = (layout(x * m) for x, m in zip(tensors, case.magnitudes, strict=True))
    dlse = None
    if case.with_dlse:
        chance = torch.Generator(q.device).manual_seed(case.number)
        rows = (q.shape[0], q.shape[2], q.shape[1])
        dlse = torch.randn(*rows, generator=chance, device=q.device) * case.magnitudes[3]
        if problem.visible is not None:  # -inf would have no gradient
            seen = problem.visible.any(-1).expand(rows)
            dlse = dlse.masked_fill(~seen, 0.0)
    return replace(problem, q=q, k=k, v=v, dout=dout, dlse=dlse, softmax_scale=case.softmax_scale)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="random attention problems against float64")
    add_options(parser, cases=5_000)
    parser.add_argument("--longest", type=int, default=LONGEST, help=f"tokens (default {LONGEST})")
    parser.add_argument("--bits-only", action="store_true", help="not held against float64")
    parser.add_argument("--only-new", action="store_true", help="each case with a newer feature")
    args = parser.parse_args(arguments)
    wide = args.device == "cpu" or torch.cuda.get_device_capability() >= (8, 0)
    draw = partial(
        draw_case,
        seed=args.seed,
        dtypes=choose_dtypes(args),
        longest=args.longest,
        new=New(1.0 if args.only_new else 0.5, wide),
    )
    check = partial(run_case, device=args.device, seed=args.seed, bits_only=args.bits_only)
    return run_program(args, draw, check)


if __name__ == "__main__":
    sys.exit(main())
