"""One small case of every kernel and of every kind of mask, as a program: for compute-sanitizer.

    compute-sanitizer --tool racecheck python tests/gpu/small_cases.py WHAT [1/4]

WHAT is all, kernels, masks, caches or boundaries; the second argument runs one of several parts.
FLASH_DIST_SMEM_LIMIT chooses the shared-memory plan. Prints the kernels that ran, and those of the
build that did not. Inputs are drawn on the CPU and copied, so that under `--kernel-name` initcheck
knows all that our kernels may read as written.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if __name__ == "__main__":  # a program is found by its path, tests by the folder that they are in
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from flash_dist.kernels.library import last_variant, variants
from tests.gpu.boundaries import CHAOS, LIES, SPARSE
from tests.gpu.packed import attend_packed, pack
from tests.gpu.running import attend
from tests.kvcache import Problem as KvProblem
from tests.masks import MASKS, masked_problem

if TYPE_CHECKING:
    from tests.reference import Problem

DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
IEEE32: Final = "ieee32"  # float32 whose products are FFMA
BUDGETS: Final = (0, 64)  # MiB: dQ computed again, and from a stored dS
SMALL: Final[dict[str, Any]] = {"seqlen_q": 130, "seqlen_k": 150, "num_heads": 2, "num_heads_kv": 1}
LENGTHS: Final = (65, 0, 30)  # of documents
KINDS: Final = ("full", "intervals", "dense-per-head")  # a band, rows and tiles


def compiled_sizes() -> list[tuple[str, int, int]]:
    """Return dtype, head_dim and head_dim_v of every kernel of the forward."""
    found = {
        (variant["dtype"], variant["head_dim"], variant.get("head_dim_v", variant["head_dim"]))
        for variant in variants()
        if variant["role"] == "fwd"
    }
    return sorted(found)


def run_kernels(ran: set[str], part: slice) -> None:
    """Run forward and backward of every compiled size, with and without workspace, and packed."""
    for dtype, head_dim, head_dim_v in compiled_sizes()[part]:
        sizes: dict[str, Any] = {
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "dtype": torch.float32 if dtype == IEEE32 else DTYPES[dtype],
        }
        precision = "ieee" if dtype == IEEE32 else "tf32x3"
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            for name in KINDS:
                problem = masked_problem(name, device="cpu", **SMALL, **sizes)
                attend(copy_to_gpu(problem), poison=False, float32_precision=precision)
                ran |= loaded()
            documents = pack(LENGTHS, num_heads=2, num_heads_kv=1, device="cpu", **sizes)
            problem = copy_to_gpu(replace(documents.problem, options={"causal": True}))
            documents = replace(documents, problem=problem)
            attend_packed(documents, poison=False, float32_precision=precision)
            ran |= loaded()


def run_masks(ran: set[str], part: slice) -> None:
    """Run every kind of mask."""
    dtype, head_dim, _ = min(compiled_sizes(), key=lambda size: abs(size[1] - 64))
    for name in list(MASKS)[part]:
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            shape = {**SMALL, "head_dim": head_dim, "dtype": DTYPES[dtype]}
            problem = masked_problem(name, batch=2, device="cpu", **shape)
            attend(copy_to_gpu(problem), poison=False)
            ran |= loaded()


def run_caches(ran: set[str]) -> None:
    """Run queries to a cache at each size of their kernels: appended, rotated, in pages, folded."""
    for dtype, head_dim in sorted({(one["dtype"], one["head_dim"]) for one in decoding()}):
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
        problem.call(problem.make(DTYPES[dtype], "cuda"))
        ran |= loaded()


def decoding() -> list[dict[str, Any]]:
    """Return the kernels that read a cache."""
    return [variant for variant in variants() if variant["role"] == "decode"]


def run_boundaries(ran: set[str], part: slice) -> None:
    """Run every compiled size with cu_seqlens that leave rows out, and with some that lie."""
    for dtype, head_dim, head_dim_v in compiled_sizes()[part]:
        for megabytes in BUDGETS:
            os.environ["FLASH_DIST_WORKSPACE_MB"] = str(megabytes)
            for boundaries in (*SPARSE.values(), *LIES.values(), *CHAOS.values()):
                documents = boundaries.problem(
                    num_heads=2,
                    num_heads_kv=1,
                    head_dim=head_dim,
                    head_dim_v=head_dim_v,
                    dtype=DTYPES[dtype],
                    causal=True,
                    device="cpu",
                )
                documents = replace(documents, problem=copy_to_gpu(documents.problem))
                given = boundaries.given(documents.problem.q.device)
                attend_packed(documents, given=given, poison=False)
                ran |= loaded()


def copy_to_gpu(problem: Problem) -> Problem:
    """Copy the inputs; no kernel of torch's writes them."""
    q, k, v, dout = (x.cuda() for x in (problem.q, problem.k, problem.v, problem.dout))
    return replace(problem, q=q, k=k, v=v, dout=dout, visible=None)


def loaded() -> set[str]:
    """Return the kernels that ran last."""
    return {variant["symbol"] for variant in last_variant().values()}


def main() -> None:
    """Run what the command line names."""
    what = sys.argv[1] if len(sys.argv) > 1 else "all"
    index, parts = map(int, (sys.argv[2] if len(sys.argv) > 2 else "1/1").split("/"))
    part = slice(index - 1, None, parts)
    ran: set[str] = set()
    if what in {"all", "kernels"}:
        run_kernels(ran, part)
    if what in {"all", "masks"}:
        run_masks(ran, part)
    if what in {"all", "caches"}:
        run_caches(ran)
    if what in {"all", "boundaries"}:
        run_boundaries(ran, part)
    torch.cuda.synchronize()
    others = sorted({variant["symbol"] for variant in variants()} - ran)
    print(f"ran {len(ran)} kernels:", *sorted(ran), sep="\n")  # noqa: T201 - a program
    print(f"did not run {len(others)} kernels:", *others, sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
