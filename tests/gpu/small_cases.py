"""One small case of every kernel and of every kind of mask, as a program: for compute-sanitizer.

compute-sanitizer --tool racecheck python tests/gpu/small_cases.py WHAT [1/4] [--dtype bf16]

WHAT is all, kernels, features, masks, cells, caches or boundaries; the second argument runs one of
several parts. FLASH_DIST_SMEM_LIMIT chooses the shared-memory plan. The program prints each kernel
after it ran. At the end it prints the kernels of the build that ran neither here nor in other runs
with the same --ran FILE, because some kernels run only with less shared memory. Inputs are drawn on
the CPU and copied. Otherwise initcheck with `--kernel-name` would report our kernels' inputs as
uninitialised, because it does not see the kernels that write them.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if __name__ == "__main__":  # run by path: this file's folder is on the path
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from flash_dist.kernels.dropout.state import MOST_COLUMNS
from flash_dist.toolkit.loading.library import last_variant, variants
from tests.gpu.boundaries import CHAOS, LIES, SPARSE
from tests.gpu.cells import LONG
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend, attend_scored, has_whole_shared_memory
from tests.kvcache import Problem as KvProblem
from tests.masks import MASKS, masked_problem
from tests.mla import Problem as LatentProblem
from tests.reference import random_problem
from tests.scores import Scored

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.reference import Problem

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
IEEE32: Final = "ieee32"  # float32 multiplied with FFMA
BUDGETS: Final = (0, 64)  # MiB: recompute dQ, or store dS
SMALL: Final[dict[str, Any]] = {"seqlen_q": 130, "seqlen_k": 150, "num_heads": 2, "num_heads_kv": 1}
SHORT: Final[dict[str, Any]] = {**SMALL, "seqlen_q": 60, "seqlen_k": 64}  # one tile
TALL: Final[dict[str, Any]] = {**SMALL, "seqlen_q": 600}  # several blocks share the queries
MANY: Final[dict[str, Any]] = {**SMALL, "batch": 140}  # fills any GPU with the largest tiles
EVEN: Final[dict[str, Any]] = {**SMALL, "batch": 40, "seqlen_q": 384}  # complete tiles of any size
ROWS_OF_A_TILE: Final = (32, 128)  # query heads: tiles then have 48 and 192 rows
# Heads, queries and keys.
LATENT: Final = ((16, 3, 1300), (64, 3, 1300), (64, 3, 4000), (64, 40, 1300))
LARGE_CAP: Final = 200.0
LENGTHS: Final = (65, 0, 30)  # of documents
BIASED_LENGTHS: Final = (66, 0, 31)  # the longest is even: kernels may load pairs of a bias
SCORES: Final = {"alibi_slopes": torch.tensor([0.5, 0.1]), "learnable_sink": torch.tensor([1.0, 0])}
# Queries to a cache that fill the forward's tiles; the tiles fill an H100 or H200.
FULL: Final = KvProblem(
    seqlens=(384,) * 11, capacity=400, heads=4, seqlen_q=384, causal=True, page=16
)
KINDS: Final = ("full", "intervals", "dense-per-head")  # masks of kind BAND, ROWS and TILES
WHAT: Final = ("all", "kernels", "features", "masks", "cells", "caches", "boundaries")

Size = tuple[str, int, int]  # dtype, head_dim, head_dim_v


class Ran(set[str]):
    """The kernels that ran so far, by their symbols."""

    def run(self, call: Callable[..., object], *given: object, **options: Any) -> None:  # noqa: ANN401
        """Make a call, add its kernels, and print new ones: a tool may stop the program.

        With less shared memory than the build is for, some calls have no kernel.
        """
        try:
            call(*given, **options)
        except RuntimeError as error:
            if has_whole_shared_memory() or "no variant of kernel" not in str(error):
                raise
            print(str(error).splitlines()[0], flush=True)  # noqa: T201 - a program
        last = {variant["symbol"] for variant in last_variant().values()}
        print(*sorted(last - self), sep="\n", end="\n" if last - self else "", flush=True)  # noqa: T201
        self.update(last)


def compiled_sizes(dtypes: Sequence[str]) -> list[Size]:
    """Return dtype, head_dim and head_dim_v of every kernel of the forward."""
    found = {
        (variant["dtype"], variant["head_dim"], variant.get("head_dim_v", variant["head_dim"]))
        for variant in variants()
        if variant["role"] == "fwd" and variant["dtype"] in dtypes
    }
    return sorted(found)


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the dtype of the tensors for a kernel's dtype."""
    return torch.float32 if dtype == IEEE32 else DTYPES[dtype]


def precision_of(dtype: str) -> str:
    """Return the float32_precision for a kernel's dtype."""
    return "ieee" if dtype == IEEE32 else "tf32x3"


def run_kernels(ran: Ran, sizes_of_part: Sequence[Size]) -> None:
    """Run forward and backward of every compiled size, with and without workspace, and packed.

    Some calls have sequences of one tile; in others, several blocks share the queries of a
    sequence. Some calls have enough sequences to fill the GPU with large tiles. One softcap,
    LARGE_CAP, is too large for the Hopper kernels, so that general kernels run.
    """
    for dtype, head_dim, head_dim_v in sizes_of_part:
        sizes: dict[str, Any] = {
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": torch_dtype(dtype),
        }
        precision = precision_of(dtype)
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            for name in KINDS:
                problem = copy_to_gpu(masked_problem(name, device="cpu", **SMALL, **sizes))
                for scores in ({}, SCORES):
                    on_gpu = {k: v.cuda() for k, v in scores.items()}
                    softcap = 3.0 if scores else 0.0
                    ran.run(
                        attend,
                        problem,
                        poison=False,
                        float32_precision=precision,
                        softcap=softcap,
                        **on_gpu,
                    )
            documents = pack(LENGTHS, num_heads=2, num_heads_kv=1, device="cpu", **sizes)
            problem = copy_to_gpu(replace(documents.problem, options={"causal": True}))
            documents = replace(documents, problem=problem)
            ran.run(attend_packed, documents, poison=False, float32_precision=precision)
        for shape in (SHORT, TALL, MANY):
            problem = copy_to_gpu(masked_problem("full", device="cpu", **shape, **sizes))
            ran.run(attend, problem, poison=False, float32_precision=precision)
        for shape, softcap in ((EVEN, 3.0), (SMALL, LARGE_CAP)):
            problem = copy_to_gpu(masked_problem("full", device="cpu", **shape, **sizes))
            ran.run(attend, problem, poison=False, float32_precision=precision, softcap=softcap)


def run_features(ran: Ran, sizes_of_part: Sequence[Size]) -> None:
    """Run a bias, dropout, both, and return_max_logit at every compiled size; a bias also packed.

    A bias has the dtype of q or float32. Its rows begin at multiples of 16 bytes, as Hopper's
    kernels require. The largest score is also requested for sequences that fill large tiles.
    """
    for dtype, head_dim, head_dim_v in sizes_of_part:
        sizes: dict[str, Any] = {
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": torch_dtype(dtype),
        }
        options = {"float32_precision": precision_of(dtype)}
        drops = head_dim <= MOST_COLUMNS and dtype != IEEE32
        fractions = (0.0, 0.25) if drops else (0.0,)  # that dropout drops
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            for name in KINDS:
                problem = copy_to_gpu(masked_problem(name, device="cpu", **SMALL, **sizes))
                problem = replace(problem, dlse=torch.zeros(1, 2, SMALL["seqlen_q"]).cuda())
                single = torch.randn(1, 2, SMALL["seqlen_q"], SMALL["seqlen_k"] + 2)
                biases = (x.cuda()[..., :-2] for x in (single, single.to(problem.q.dtype)))
                for bias, dropout_p in product((*biases, None), fractions):
                    scored = Scored(problem, bias=bias, dropout_p=dropout_p)
                    ran.run(attend_scored, scored, poison=False, **options)
            documents = pack(BIASED_LENGTHS, num_heads=2, num_heads_kv=1, device="cpu", **sizes)
            problem = copy_to_gpu(replace(documents.problem, options={"causal": True}))
            documents = replace(documents, problem=problem)
            for bias, dropout_p in product(biases, fractions):
                how = {"bias": bias, "dropout_p": dropout_p, **options}
                ran.run(attend_packed, documents, poison=False, **how)
        for shape in (SMALL, EVEN):
            problem = copy_to_gpu(masked_problem("full", device="cpu", **shape, **sizes))
            ran.run(attend, problem, poison=False, return_max_logit=True, **options)


def run_masks(ran: Ran, sizes: Sequence[Size], part: slice) -> None:
    """Run every kind of mask."""
    dtype, head_dim, _ = min(sizes, key=lambda size: abs(size[1] - 64))
    for name in list(MASKS)[part]:
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            shape = {**SMALL, "head_dim": head_dim, "dtype": torch_dtype(dtype)}
            problem = masked_problem(name, batch=2, device="cpu", **shape)
            ran.run(attend, copy_to_gpu(problem), poison=False)


def run_cells(ran: Ran, sizes: Sequence[Size]) -> None:
    """Run long sequences whose keys and queries are both cut."""
    for dtype, head_dim, head_dim_v in sizes:
        for long in LONG:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(long.megabytes)
            problem = random_problem(
                seqlen_q=long.seqlen_q,
                seqlen_k=long.seqlen_k,
                num_heads=long.num_heads,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                dtype=torch_dtype(dtype),
                device="cpu",
            )
            problem = copy_to_gpu(replace(problem, options={"causal": long.causal}))
            ran.run(attend, problem, poison=False, float32_precision=precision_of(dtype))


def run_caches(ran: Ran) -> None:
    """Run attention to a cache at each compiled size: appended keys, rotary angles, pages.

    It also runs short caches, more rows of a tile, many queries, a small head_dim, and latent keys
    with few and with many heads, queries and keys. On Hopper, other kernels run in these calls.
    """
    os.environ["FLASH_DIST_WORKSPACE_MB"] = str(BUDGETS[1])
    caches = {(one["dtype"], one["head_dim"]) for one in of_role("decode")}
    for dtype, head_dim in sorted({*caches, *((dtype, 32) for dtype, _ in caches)}):
        problem = KvProblem(
            seqlens=(1300, 0, 130),
            capacity=1312,
            heads=4,
            seqlen_q=3,
            head_dim=head_dim,
            causal=True,
            page=16,
            seqlen_new=3,
            rotary_dim=32,
        )
        short = replace(problem, seqlens=(400, 0, 130), capacity=512)
        rows = (replace(problem, heads=heads) for heads in ROWS_OF_A_TILE)
        for one in (problem, short, *rows, replace(FULL, head_dim=head_dim)):
            ran.run(one.call, one.make(DTYPES[dtype], "cuda"))
    for dtype, head_dim, head_dim_v in sorted(
        {(one["dtype"], one["head_dim"], one["head_dim_v"]) for one in of_role("mla")}
    ):
        for heads, seqlen_q, seqlen_k in LATENT:
            latent = LatentProblem(
                seqlens=(seqlen_k, 0, 130),
                capacity=seqlen_k + 12,
                heads=heads,
                seqlen_q=seqlen_q,
                head_dim=head_dim,
                head_dim_v=head_dim_v,
                causal=True,
                page=16,
            )
            ran.run(latent.call, latent.make(DTYPES[dtype], "cuda"))


def of_role(role: str) -> list[dict[str, Any]]:
    """Return the kernels of a role."""
    return [variant for variant in variants() if variant["role"] == role]


def run_boundaries(ran: Ran, sizes: Sequence[Size]) -> None:
    """Run every compiled size with cu_seqlens that omit rows, and with invalid ones."""
    for dtype, head_dim, head_dim_v in sizes:
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            for boundaries in (*SPARSE.values(), *LIES.values(), *CHAOS.values()):
                documents = boundaries.problem(
                    num_heads=2,
                    num_heads_kv=1,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    dtype=torch_dtype(dtype),
                    causal=True,
                    device="cpu",
                )
                documents = replace(documents, problem=copy_to_gpu(documents.problem))
                given = boundaries.given(documents.problem.q.device)
                ran.run(
                    attend_packed,
                    documents,
                    given=given,
                    poison=False,
                    float32_precision=precision_of(dtype),
                )


def copy_to_gpu(problem: Problem) -> Problem:
    """Copy the inputs to the GPU; no torch kernel writes them."""
    q, k, v, dout = (x.cuda() for x in (problem.q, problem.k, problem.v, problem.dout))
    return replace(problem, q=q, k=k, v=v, dout=dout, visible=None)


def main() -> None:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="all", choices=WHAT)
    parser.add_argument("part", nargs="?", default="1/1", metavar="I/N")
    parser.add_argument("--dtype", action="append", choices=(*DTYPES, IEEE32), help="not all")
    parser.add_argument("--ran", type=Path, metavar="FILE", help="kernels of other runs, to extend")
    options = parser.parse_args()
    index, parts = map(int, options.part.split("/"))
    part = slice(index - 1, None, parts)
    sizes = compiled_sizes(options.dtype or (*DTYPES, IEEE32))
    ran = Ran()
    if options.what in {"all", "kernels"}:
        run_kernels(ran, sizes[part])
    if options.what in {"all", "features"}:
        run_features(ran, sizes[part])
    if options.what in {"all", "masks"}:
        run_masks(ran, sizes, part)
    if options.what in {"all", "cells"}:
        run_cells(ran, [size for size in sizes[part] if size[0] in DTYPES])
    if options.what in {"all", "caches"}:
        run_caches(ran)
    if options.what in {"all", "boundaries"}:
        run_boundaries(ran, sizes[part])
    torch.cuda.synchronize()
    if options.ran:
        options.ran.touch()
        before = options.ran.read_text(encoding="utf-8").split()
        with options.ran.open("a", encoding="utf-8") as file:
            file.writelines(f"{symbol}\n" for symbol in sorted(ran.difference(before)))
        ran.update(before)
    others = sorted({variant["symbol"] for variant in variants()} - ran)
    print(f"{len(ran)} kernels ran, {len(others)} did not:", *others, sep="\n")  # noqa: T201 - a program
    time.sleep(1)  # NOTE: wait until torch's thread has released the last graph, see test_exit.py


if __name__ == "__main__":
    main()
