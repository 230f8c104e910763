"""Packed documents of different lengths, and the equivalent masked Problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from flash_dist import flash_attn_varlen_func
from tests.gpu.running import poison_memory
from tests.reference import NAMES, Problem, random_problem

Tensor = torch.Tensor


@dataclass(frozen=True)
class Packed:
    """One varlen call; `problem` has batch 1 and a mask that keeps documents apart."""

    problem: Problem
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def document(self, index: int) -> Problem:
        """Return one document as a separate call."""
        problem = self.problem
        q, k = (starts(lengths) for lengths in (self.lengths_q, self.lengths_k))
        rows, keys = slice(q[index], q[index + 1]), slice(k[index], k[index + 1])
        return replace(
            problem,
            q=problem.q[:, rows],
            k=problem.k[:, keys],
            v=problem.v[:, keys],
            dout=problem.dout[:, rows],
            visible=None if problem.visible is None else problem.visible[:, :, rows, keys],
        )

    def part(self, result: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """Return a document's part of the result."""
        q, k = (starts(lengths) for lengths in (self.lengths_q, self.lengths_k))
        rows, keys = slice(q[index], q[index + 1]), slice(k[index], k[index + 1])
        return {
            "out": result["out"][:, rows],
            "lse": result["lse"][:, :, rows],
            "dq": result["dq"][:, rows],
            "dk": result["dk"][:, keys],
            "dv": result["dv"][:, keys],
        }


def starts(lengths: tuple[int, ...]) -> list[int]:
    """Return the start of each document, and the end."""
    return list(accumulate(lengths, initial=0))


def pack(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...] | None = None,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **shape: Any,  # noqa: ANN401 - of random_problem
) -> Packed:
    """Return random documents. causal and window are aligned to the bottom right of each."""
    lengths_k = lengths_k or lengths_q
    base = random_problem(seqlen_q=sum(lengths_q), seqlen_k=sum(lengths_k), **shape)
    there: dict[str, Any] = {"dtype": torch.bool, "device": base.q.device}
    visible = torch.zeros(sum(lengths_q), sum(lengths_k), **there)
    ends = zip(lengths_q, lengths_k, starts(lengths_q)[1:], starts(lengths_k)[1:], strict=True)
    left, right = window_size[0], 0 if causal else window_size[1]
    for length_q, length_k, end_q, end_k in ends:
        band = torch.ones(length_q, length_k, **there)
        if right >= 0:
            band = band.tril(length_k - length_q + right)
        if left >= 0:
            band = band.triu(length_k - length_q - left)
        visible[end_q - length_q : end_q, end_k - length_k : end_k] = band
    options: dict[str, object] = {"causal": causal, "window_size": window_size}
    name = f"documents {options}"
    problem = replace(base, visible=visible[None, None], options=options, name=name)
    return Packed(problem, lengths_q, lengths_k)


def boundaries(packed: Packed, device: torch.device) -> dict[str, Any]:
    """Return cu_seqlens and the longest lengths as arguments."""
    return {
        "cu_seqlens_q": torch.tensor(starts(packed.lengths_q), dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor(starts(packed.lengths_k), dtype=torch.int32, device=device),
        "max_seqlen_q": max(packed.lengths_q),
        "max_seqlen_k": max(packed.lengths_k),
    }


def attend_packed(
    packed: Packed,
    *,
    poison: bool = True,
    given: dict[str, Any] | None = None,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    **options: Any,  # noqa: ANN401 - of flash_attn_varlen_func
) -> dict[str, Tensor]:
    """Return the results of `attend` with a batch axis of 1, and gradients of sinks and bias."""
    problem = packed.problem
    inputs = problem.q, problem.k, problem.v
    q, k, v = leaves = [x[0].detach().requires_grad_() for x in inputs]
    learned = {}
    for name, argument, x in (("dsinks", "learnable_sink", sinks), ("dbias", "bias", bias)):
        if x is not None:
            leaves.append(x.detach().requires_grad_())
            learned[name] = options[argument] = leaves[-1]
    given = given or boundaries(packed, q.device)
    if poison:
        poison_memory(q.device)
    out, lse, *rest = flash_attn_varlen_func(
        q,
        k,
        v,
        **given,
        softmax_scale=problem.softmax_scale,
        return_lse=True,
        **{**problem.options, **options},
    )
    if poison:
        poison_memory(q.device)
    outputs = (out,) if problem.dlse is None else (out, lse)
    grads = (problem.dout[0],) if problem.dlse is None else (problem.dout[0], problem.dlse[0])
    dq, dk, dv, *of_learned = torch.autograd.grad(outputs, leaves, grads)
    tensors = (out.detach(), lse.detach(), dq, dk, dv)
    result = {name: x.unsqueeze(0) for name, x in zip(NAMES, tensors, strict=True)}
    result |= dict(zip(("max_logit",), rest, strict=False))
    return result | dict(zip(learned, of_learned, strict=True))
