"""Our own attention on a problem; masks are made before any timing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from .failures import CannotRun
from .scoring import require_plain_scores, score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from .problem import Problem

    Attend = Callable[..., torch.Tensor]  # from a problem's inputs to out

_PAGE: Final = 64  # keys per page of an MLA cache


def make_ours(problem: Problem) -> Attend:
    """Return a function that computes a problem's attention with our kernels."""
    if problem.shape.documents:
        return _make_packed(problem)
    if problem.shape.latent:
        return _make_latent(problem)
    if problem.shape.cached:
        return _make_cached()
    from ...attention.batched import flash_attn_func  # noqa: PLC0415 - import errors are reported in the row

    func: Any = flash_attn_func
    arguments = mask_arguments(problem) | score_arguments(problem)
    if problem.bias is not None:
        del arguments["bias"]
        return lambda q, k, v, bias: func(q, k, v, bias=bias, **arguments)
    return lambda q, k, v: func(q, k, v, **arguments)


def mask_arguments(problem: Problem) -> dict[str, Any]:
    """Return the arguments of `flash_attn_func` for the mask."""
    mask = problem.shape.mask
    if mask.kind == "full":
        return {}
    if mask.kind == "causal":
        return {"causal": True}
    if mask.kind == "window":
        return {"window_size": mask.numbers}
    from ...masks import BlockMask  # noqa: PLC0415

    if mask.kind == "block-causal":
        ids = [problem.block_ids(x) for x in (problem.shape.seqlen_q, problem.shape.seqlen_k)]
        return {"mask": BlockMask.block_causal(*ids)}
    if mask.kind == "random":
        return {"mask": BlockMask.from_dense(problem.random_mask)}
    return {"mask": BlockMask.from_intervals(*problem.intervals)}


def _make_packed(problem: Problem) -> Attend:
    require_plain_scores(problem)
    from ...attention.packed import flash_attn_varlen_func  # noqa: PLC0415

    func: Any = flash_attn_varlen_func
    begins, longest = problem.cu_seqlens, max(problem.shape.documents)
    causal = _causal_or_full(problem)
    return lambda q, k, v: func(q, k, v, begins, begins, longest, longest, causal=causal)


def _make_cached() -> Attend:
    from ...attention.decoding.kvcache import flash_attn_with_kvcache  # noqa: PLC0415

    attend: Attend = flash_attn_with_kvcache
    return attend


def _make_latent(problem: Problem) -> Attend:
    from ...attention.decoding.latent import flash_mla_with_kvcache  # noqa: PLC0415

    shape = problem.shape
    pages = torch.arange(shape.batch * shape.seqlen_k // _PAGE, device=problem.device)
    table = pages.to(torch.int32).reshape(shape.batch, -1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        in_pages = k.reshape(-1, _PAGE, *k.shape[2:])
        return flash_mla_with_kvcache(q, in_pages, table, None, v.shape[-1])[0]

    return attend


def _causal_or_full(problem: Problem) -> bool:
    if problem.shape.mask.kind not in {"causal", "full"}:
        message = f"mask of packed documents must be causal or full, got {problem.shape.mask}"
        raise CannotRun(message)
    return problem.shape.mask.kind == "causal"
