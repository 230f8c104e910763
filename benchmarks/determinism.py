"""Thousands of runs over 64 shapes: how many differ from the first in any bit.

    python benchmarks/determinism.py [--runs 500] [--scores 5] [--only WORDS] [--bits FILE]

A run is a forward and a backward. All head_dims, masks, packed documents, float32; some fill every
multiprocessor in one launch, some cut keys into stripes, or queries as well, some split query
groups, or share queries, some store no dS, some begin with the first keys; some have a bias,
dropout, or return the largest scores. --scores N runs each shape with N random combinations of
softcap, ALiBi (slopes of heads, or of heads of each sequence) and sinks instead, the same for the
same --seed.
--bits writes a digest of each shape's results to a file that does not exist, and holds them against
one that does: of another machine, or of kernels that were built with delays (docs/debugging.md).
Which way a backward went is then not looked up, which takes longer than a few runs. --device cpu
--shorter 64 tries the program itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flash_dist import flash_attn_func, flash_attn_varlen_func
from flash_dist.masks import BlockMask
from flash_dist.toolkit.loading.library import last_variant, variants

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
Tensor = torch.Tensor

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BITS = {2: torch.int16, 4: torch.int32}
DOCUMENTS = (700, 65, 1500, 3, 0, 900, 31, 897)
SOFTCAP = 3.0  # small, so that scores reach it
DROPOUT_P = 0.25
ALL_SCORES = "softcap alibi sinks"
# Every combination of what happens to scores, but none at all.
SCORES = tuple(
    " ".join(filter(None, one))
    for one in product(("", "softcap"), ("", "alibi", "alibi-batch"), ("", "sinks"))
)[1:]


@dataclass(frozen=True)
class Shape:
    """One problem and the workspace (MiB) that makes it take the path it is there for."""

    name: str
    batch: int  # 0: documents packed one behind the other
    seqlen: int
    num_heads: int
    num_heads_kv: int
    head_dim: int
    mask: str = "full"
    megabytes: int = 1024
    dtype: str = "bf16"
    head_dim_v: int = 0
    scores: str = ""  # of SCORES, or of bias, dropout and max_logit
    shorter: int = 1  # what lengths are divided by

    def __str__(self) -> str:
        head_dim = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v else "")
        scores = f", {self.scores}" if self.scores else ""
        return f"{self.name}, {self.dtype} {self.mask} {head_dim}, {self.megabytes} MB{scores}"

    @property
    def documents(self) -> tuple[int, ...]:
        """Their lengths."""
        return tuple(length // self.shorter for length in DOCUMENTS)

    @property
    def tokens(self) -> int:
        """Of a sequence, or of all documents."""
        return max(self.seqlen // self.shorter, 1) if self.batch else sum(self.documents)


SHAPES = (
    Shape("fills the GPU", 4, 2048, 16, 16, 64),
    Shape("fills the GPU", 4, 2048, 16, 16, 128, "causal"),
    Shape("head_dim 32", 4, 1000, 16, 4, 32, "window"),
    Shape("head_dim 96", 2, 1111, 16, 4, 96, "prefix"),
    Shape("head_dim 160", 2, 1111, 8, 4, 160, "documents"),
    Shape("head_dim 192/128", 2, 1024, 16, 16, 192, "causal", head_dim_v=128),
    Shape("head_dim 192", 2, 777, 8, 2, 192, "padding"),
    Shape("head_dim 224", 2, 1024, 8, 8, 224, "intervals", dtype="fp16"),
    Shape("policy", 2, 1024, 8, 1, 256, "blocks"),
    Shape("policy, recompute", 2, 1024, 8, 1, 256, "blocks", 0),
    Shape("group split", 1, 1024, 16, 1, 128, "causal"),
    Shape("stripes", 1, 4096, 8, 8, 128, megabytes=100),
    Shape("chunks of heads", 1, 4096, 8, 8, 64, "causal", 8),
    Shape("recompute", 8, 1024, 16, 16, 64, "causal", 0),
    Shape("dense mask", 2, 1024, 8, 4, 64, "dense"),
    Shape("dense mask, stripes", 2, 2048, 8, 8, 128, "dense", 24),
    Shape("packed documents", 0, sum(DOCUMENTS), 8, 2, 64, "causal", dtype="fp16"),
    Shape("packed documents", 0, sum(DOCUMENTS), 8, 2, 128, "causal"),
    Shape("packed documents", 0, sum(DOCUMENTS), 8, 2, 256),
    Shape("float32", 2, 777, 8, 2, 128, "causal", dtype="fp32"),
    Shape("cells", 1, 16384, 4, 4, 256, megabytes=250),
    Shape("cells", 1, 16384, 4, 4, 192, "causal", 150),
    Shape("tiles of 64 queries", 1, 1024, 4, 4, 128, "causal"),
    Shape("sequences of one tile", 70, 60, 8, 2, 64, "causal"),
    Shape("shared queries", 1, 4096, 1, 1, 128),
    Shape("shared queries", 1, 1111, 3, 3, 64, "causal", dtype="fp16"),
    Shape("shared queries", 1, 1500, 4, 2, 96, "blocks"),
    Shape("first keys first", 4, 2048, 16, 4, 128, "causal"),
    Shape("first keys first", 2, 2048, 16, 4, 64, "blocks"),
    Shape("first keys first, long", 1, 32768, 2, 1, 128, "causal"),
    Shape("turns that wait", 1, 4096, 4, 4, 128),
    Shape("scored", 4, 2048, 16, 16, 64, "causal", scores="softcap"),
    Shape("scored", 4, 2048, 16, 4, 64, dtype="fp16", scores=ALL_SCORES),
    Shape("scored", 4, 2048, 16, 16, 128, scores="alibi"),
    Shape("scored", 4, 2048, 16, 4, 128, "causal", dtype="fp16", scores=ALL_SCORES),
    Shape("scored", 2, 1111, 16, 4, 96, "prefix", scores=ALL_SCORES),
    Shape("scored", 2, 1024, 16, 16, 192, "causal", head_dim_v=128, scores=ALL_SCORES),
    Shape("scored", 2, 777, 8, 2, 192, "padding", scores=ALL_SCORES),
    Shape("scored policy", 2, 1024, 8, 1, 256, "blocks", scores=ALL_SCORES),
    Shape("scored, recompute", 8, 1024, 16, 16, 128, "causal", 0, scores=ALL_SCORES),
    Shape("scored, stripes", 1, 4096, 8, 8, 256, megabytes=100, scores="softcap sinks"),
    Shape("scored dense mask", 2, 2048, 8, 4, 128, "dense", scores=ALL_SCORES),
    Shape("scored documents", 0, sum(DOCUMENTS), 8, 2, 128, "causal", scores=ALL_SCORES),
    Shape("bias", 4, 2048, 16, 16, 64, scores="bias"),
    Shape("bias", 2, 1024, 16, 4, 128, "causal", dtype="fp16", scores="bias sinks"),
    Shape("bias of odd rows", 2, 1111, 8, 2, 128, "blocks", scores="bias"),
    Shape("bias, recompute", 2, 1024, 8, 8, 256, "causal", 0, scores="bias alibi"),
    Shape("dropout", 4, 2048, 16, 16, 64, "causal", scores="dropout"),
    Shape("dropout", 4, 2048, 16, 4, 128, "causal", scores="dropout sinks"),
    Shape("dropout, stored", 4, 2048, 16, 4, 128, dtype="fp16", scores="dropout"),
    Shape("dropout and bias", 2, 1111, 8, 4, 128, "dense", scores="dropout bias"),
    Shape("dropout documents", 0, sum(DOCUMENTS), 8, 2, 256, "causal", scores="dropout"),
    Shape("largest scores", 4, 2048, 16, 16, 64, "causal", scores="max_logit"),
    Shape("largest scores", 4, 2048, 16, 4, 128, scores="max_logit"),
    Shape("largest scores", 2, 1111, 8, 8, 192, "window", head_dim_v=128, scores="max_logit"),
    Shape("largest scores", 4, 2048, 8, 8, 256, "causal", scores="max_logit"),
    Shape("largest scores of few tiles", 1, 512, 4, 4, 64, scores="max_logit"),
    Shape("largest scores of few tiles", 1, 512, 4, 4, 128, "causal", scores="max_logit"),
    Shape("largest scores", 2, 1111, 8, 2, 96, "dense", scores="max_logit softcap"),
    Shape("largest scores", 0, sum(DOCUMENTS), 8, 2, 128, "causal", scores="max_logit"),
    Shape("pairs of blocks", 2, 2048, 8, 8, 384, "causal"),
    Shape("pairs of blocks", 2, 2048, 8, 2, 512, "causal", dtype="fp16"),
    Shape("pairs of blocks", 2, 1111, 8, 8, 512, "window", 0),
    Shape("pairs of blocks", 0, sum(DOCUMENTS), 8, 2, 512, scores="max_logit"),
)


def make_attention(
    shape: Shape, scores: dict[str, object], device: str
) -> Callable[..., tuple[Tensor, ...]]:
    """Return the call of a shape as a function of q, k, v and, if it has any, sinks and bias.

    Its results are out and, if asked for, the largest scores.
    """
    if shape.batch:
        function = partial(flash_attn_func, **make_mask(shape))
    else:
        starts = torch.tensor([0, *accumulate(shape.documents)], dtype=torch.int32, device=device)
        longest = max(shape.documents)
        function = partial(
            flash_attn_varlen_func,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=shape.mask == "causal",
        )

    def attention(q: Tensor, k: Tensor, v: Tensor, **learned: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(0)  # of dropout
        results = function(q, k, v, **scores, **learned)
        return results if isinstance(results, tuple) else (results,)

    return attention


def make_scores(shape: Shape, device: str) -> dict[str, object]:
    """Return what happens to scores as arguments, without a gradient."""
    words = shape.scores.split()
    scores: dict[str, object] = {"softcap": SOFTCAP} if "softcap" in words else {}
    if "dropout" in words:
        scores["dropout_p"] = DROPOUT_P
    if "max_logit" in words:
        scores["return_max_logit"] = True
    slopes = 2.0 ** -torch.arange(1.0, shape.num_heads + 1, device=device)
    if "alibi" in words:
        scores["alibi_slopes"] = slopes
    elif "alibi-batch" in words:
        sequences = shape.batch or len(shape.documents)
        steps = torch.arange(1.0, sequences + 1, device=device)
        scores["alibi_slopes"] = slopes / steps.unsqueeze(1)
    return scores


def make_learned(shape: Shape, device: str) -> dict[str, Tensor]:
    """Return sinks and bias as arguments."""
    words, learned = shape.scores.split(), {}
    if "sinks" in words:
        learned["learnable_sink"] = torch.linspace(-2.0, 2.0, shape.num_heads, device=device)
    if "bias" in words:
        generator = torch.Generator(device).manual_seed(1)
        size = (1, shape.num_heads, shape.tokens, shape.tokens)
        bias = torch.randn(size, device=device, generator=generator)
        learned["bias"] = bias.to(DTYPES[shape.dtype])
    return learned


def make_mask(shape: Shape) -> dict[str, object]:
    """Return the mask as arguments."""
    if shape.mask in {"full", "causal"}:
        return {"causal": shape.mask == "causal"}
    if shape.mask == "window":
        return {"window_size": (200 // shape.shorter, 40 // shape.shorter)}
    return {"mask": make_object(shape)}


def make_object(shape: Shape) -> BlockMask:
    """Return a mask object."""
    seqlen = shape.tokens
    generator = torch.Generator().manual_seed(0)
    index = torch.arange(seqlen)
    lengths = torch.arange(1, shape.batch + 1) * seqlen // (shape.batch + 1)
    if shape.mask == "blocks":
        return BlockMask.block_causal(index * 16 // seqlen)
    if shape.mask == "documents":
        return BlockMask.documents(index * 5 // seqlen) & BlockMask.causal()
    if shape.mask == "prefix":
        return BlockMask.prefix(lengths)
    if shape.mask == "padding":
        return BlockMask.padding(lengths, side="left") & BlockMask.causal()
    if shape.mask == "intervals":
        bounds = torch.randint(0, seqlen + 1, (2, seqlen), generator=generator)
        return BlockMask.from_intervals(*bounds.sort(0).values)
    tiles = torch.rand(1, shape.num_heads, 32, 32, generator=generator) < 0.6  # noqa: PLR2004
    size = -(-seqlen // 32)
    shown = tiles.repeat_interleave(size, -2).repeat_interleave(size, -1)
    bits = torch.rand(seqlen, seqlen, generator=generator) < 0.9  # noqa: PLR2004
    return BlockMask.from_dense(shown[..., :seqlen, :seqlen] & bits)


def draw(shape: Shape, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, v, dout."""
    generator = torch.Generator(device).manual_seed(0)
    head_dim_v = shape.head_dim_v or shape.head_dim
    batch = (shape.batch,) if shape.batch else ()

    def normal(heads: int, head_dim: int) -> Tensor:
        size = (*batch, shape.tokens, heads, head_dim)
        return torch.randn(size, device=device, generator=generator).to(DTYPES[shape.dtype])

    return (
        normal(shape.num_heads, shape.head_dim),
        normal(shape.num_heads_kv, shape.head_dim),
        normal(shape.num_heads_kv, head_dim_v),
        normal(shape.num_heads, head_dim_v),
    )


def describe_path(run: Callable[[], object]) -> str:
    """Say where dQ comes from, in how many launches of dK and dV, and whether sums were partial."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}

    def launches(part: str) -> int:
        return sum(count for name, count in counts.items() if part in name)

    if launches("fused"):
        words = ["all in one kernel"]
    else:
        words = ["dS stored" if launches("dq_gemm") else "dS computed again"]
    chunks = launches("dkdv") + launches("fused")
    if chunks > 1:
        words.append(f"{chunks} chunks")
    if launches("reduce"):
        words.append("partial sums")
    return ", ".join(words)


@dataclass(frozen=True)
class Count:
    """What the runs of a shape gave."""

    runs: int  # that differ from the first
    elements: int  # that differ, in all of them
    digest: str  # of the bits of the first
    path: str
    kernels: frozenset[str]  # symbols


def count_differing(
    shape: Shape, runs: int, *, device: str = "cuda", with_path: bool = True
) -> Count:
    """Run a shape again and again."""
    os.environ["FLASH_DIST_WORKSPACE_MB"] = str(shape.megabytes)
    *qkv, dout = draw(shape, device)
    learned = make_learned(shape, device)
    inputs = tuple(x.requires_grad_() for x in (*qkv, *learned.values()))
    attention = make_attention(shape, make_scores(shape, device), device)

    def run() -> tuple[Tensor, ...]:
        out, *largest = attention(*qkv, **learned)
        return (out.detach(), *largest, *torch.autograd.grad(out, inputs, dout))

    first = run()
    kernels = frozenset(loaded["symbol"] for loaded in last_variant().values())
    differing = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(runs):
        count = torch.stack([_differing(a, b) for a, b in zip(first, run(), strict=True)]).sum()
        differing += torch.stack(((count > 0).long(), count))
    runs_differing, elements = differing.tolist()
    path = describe_path(run) if with_path else ""
    return Count(runs_differing, elements, digest(first), path, kernels)


def _differing(a: Tensor, b: Tensor) -> Tensor:
    bits = BITS[a.element_size()]
    return (a.view(bits) != b.view(bits)).sum()


def digest(tensors: tuple[Tensor, ...]) -> str:
    """Return 16 hexadecimal digits of the bits of some tensors."""
    hashed = hashlib.sha256()
    for tensor in tensors:
        hashed.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def compare_digests(path: Path, found: dict[str, str]) -> int:
    """Write digests to a new file, or print which shapes another file says else of; how many."""
    if not path.exists():
        path.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        return 0
    expected = json.loads(path.read_text(encoding="utf-8"))
    others = [name for name, bits in found.items() if expected.get(name) != bits]
    print(f"{len(found)} shapes, {len(others)} have other bits than in {path}", *others, sep="\n  ")
    return len(others)


def draw_scores(shapes: Sequence[Shape], count: int, seed: int) -> Iterator[Shape]:
    """Yield each plain shape with so many different combinations of what happens to scores."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    for shape in shapes:
        if shape.scores:
            continue
        for scores in chance.sample(SCORES, count):
            yield replace(shape, scores=scores)


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=500, help="of each shape")
    parser.add_argument("--only", default="", metavar="WORDS", help="shapes that have all of them")
    parser.add_argument("--bits", type=Path, metavar="FILE", help="digests to write or to compare")
    parser.add_argument(
        "--scores",
        type=int,
        default=0,
        metavar="N",
        choices=range(1, len(SCORES) + 1),
        help=f"each shape with N random combinations of softcap, ALiBi, sinks; 1 to {len(SCORES)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --scores")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shorter", type=int, default=1, metavar="N", help="divides all lengths")
    return parser.parse_args()


def main() -> int:
    """Print one line per shape, and the sum."""
    options = parse_options()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{NO_GPU}`--device cpu` runs the reference path")
    shapes: Sequence[Shape] = [replace(shape, shorter=options.shorter) for shape in SHAPES]
    if options.scores:
        shapes = list(draw_scores(shapes, options.scores, options.seed))
    words = options.only.split()
    shapes = [shape for shape in shapes if all(word in str(shape) for word in words)]
    begin, failed = time.monotonic(), 0
    ran: set[str] = set()
    found: dict[str, str] = {}
    with_path = options.bits is None and options.device == "cuda"
    for shape in shapes:
        count = count_differing(shape, options.runs, device=options.device, with_path=with_path)
        failed += count.runs
        ran |= count.kernels
        found[str(shape)] = count.digest
        print(
            f"{shape}: {options.runs} runs, {count.runs} differ ({count.elements} elements)"
            f"{count.path and '; '}{count.path}",
            flush=True,
        )
    seconds = time.monotonic() - begin
    print(f"{options.runs * len(shapes)} runs, {failed} differ; {seconds:.0f} s")
    if options.device == "cuda":
        name_unseen(ran)
    failed += compare_digests(options.bits, found) if options.bits else 0
    return 1 if failed else 0


def name_unseen(ran: set[str]) -> None:
    """Print the kernels for Hopper alone that no shape took."""
    unseen = sorted({kernel["symbol"] for kernel in variants()} - ran)
    print(f"{len(ran)} kernels ran; not those for Hopper alone:")
    print(*(f"  {symbol}" for symbol in unseen if "_sm90_" in symbol), sep="\n")


if __name__ == "__main__":
    sys.exit(main())
