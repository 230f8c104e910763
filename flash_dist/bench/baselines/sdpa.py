"""torch's scaled_dot_product_attention, one backend at a time."""

from __future__ import annotations

import inspect
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from .failures import CannotRun
from .names import DETERMINISTIC
from .scoring import require_plain_scores, score_arguments

if TYPE_CHECKING:
    from .ours import Attend
    from .problem import Problem

BACKENDS: Final = {
    "sdpa-flash": SDPBackend.FLASH_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def make_sdpa(name: str, problem: Problem) -> Attend:
    """Return attention with one backend of SDPA, on inputs with the axes of `Problem`.

    Raises:
        CannotRun: The backend does not support the problem.
    """
    base = name.removesuffix(DETERMINISTIC)
    if problem.shape.documents or problem.shape.scores != "dropout":
        require_plain_scores(problem)
    if problem.shape.documents:
        return _make_packed(base, problem)
    backend = BACKENDS[base]
    shape = problem.shape
    arguments = score_arguments(problem)
    if shape.mask.kind == "causal" and shape.seqlen_q == shape.seqlen_k:
        arguments["is_causal"] = True
    elif problem.visible is not None:
        arguments["attn_mask"] = problem.visible
    group = shape.num_heads_q // shape.num_heads_kv
    expanded = group > 1 and backend is SDPBackend.EFFICIENT_ATTENTION  # does not support GQA
    if group > 1 and not expanded:
        arguments["enable_gqa"] = True

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if expanded:
            k, v = (expand_heads(x, group) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, **arguments).transpose(1, 2)

    _try_out(attend, problem)
    return attend


def expand_heads(x: torch.Tensor, group: int) -> torch.Tensor:
    """Repeat the heads of x, [batch, seqlen, heads, head_dim], `group` times each.

    For a single head, this is a view.
    """
    if x.shape[2] == 1:
        return x.expand(-1, -1, group, -1)
    return x.repeat_interleave(group, dim=2)


def _try_out(attend: Attend, problem: Problem) -> None:
    """Run attention once; if the backend cannot, raise CannotRun with torch's reason for it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            attend(*problem.inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = [str(warning.message).split(" (Triggered")[0] for warning in caught]
            raise CannotRun(_explain(said, str(error))) from error


def _explain(said: list[str], error: str) -> str:
    """Return the warning that follows `... not used because`, or else the error's first line."""
    for place, text in enumerate(said):
        if "not used because" in text and place + 1 < len(said):
            following = said[place + 1]
            if "been runtime disabled" not in following and "not used because" not in following:
                return following.splitlines()[0]
    return error.splitlines()[0]


def _make_packed(base: str, problem: Problem) -> Attend:
    if base != "sdpa-flash":
        message = f"{base} does not support packed documents"
        raise CannotRun(message)
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - missing in some versions of torch

    begins, longest = problem.cu_seqlens, max(problem.shape.documents)
    causal = problem.shape.mask.kind == "causal"
    func: Any = varlen_attn
    arguments: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
    if "window_size" not in inspect.signature(func).parameters:  # as in torch 2.10
        arguments = {"is_causal": causal}

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = func(q, k, v, begins, begins, longest, longest, **arguments)
        return out

    return attend
