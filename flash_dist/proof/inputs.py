"""The tensors of a selftest case, and the call of attention on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..kernels.budget import BUDGET_NOW
from ..kernels.choices import IEEE32, float32_precision, match_kvcache
from ..kernels.dropout.state import Dropout
from ..kernels.scores import PLAIN
from ..toolkit.selftest.comparison import Tensors, make_values
from .cases import WHOLE
from .masks import DTYPES, cu_seqlens, find_visible, make_mask, make_scores
from .reference import MAX_LOGIT, attend, name_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..kernels.scores import Scores
    from ..masks import BlockMask
    from .cases import Case

    Attention = Callable[..., tuple[torch.Tensor, torch.Tensor]]  # see load_attention

Tensor = torch.Tensor

_RNG_STATE = ((1 << 62) + 12345678901234567, (1 << 40) + 4000000000)  # seed and offset
_Q_SCALE = 4.0  # factor on q that spreads the scores, so that the softmax is not flat


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    mask: BlockMask | None = None
    scores: Scores = PLAIN

    @classmethod
    def make(cls, case: Case, device: torch.device) -> Inputs:
        """Return inputs whose tensors are filled by an integer hash, each with a different seed."""
        dtype = DTYPES[case.dtype]
        k = make_values(2, case.k_shape, dtype, device=device)
        v = make_values(3, case.v_shape, dtype, device=device)
        return cls(
            make_values(1, case.q_shape, dtype, device=device, scale=_Q_SCALE),
            k,
            k[..., : case.v_shape[-1]] if case.latent else v,
            make_values(4, case.out_shape, dtype, device=device),
            make_mask(case),
            make_scores(case, device),
        )

    def describe_mask(self, case: Case) -> dict[str, Any]:
        """Return {"mask": digest of the mask's plan}; empty without a mask or for a band."""
        if self.mask is None or self.mask.band is not None:
            return {}
        sizes = (case.batch, case.num_heads_q, case.seqlen_q, case.seqlen_k)
        return {"mask": self.mask.plan(*sizes).digest()}

    def attend(self, attention: Attention, case: Case) -> Tensors:
        """Run forward and backward once; for a cache or max_logit only the forward."""
        if case.page:
            return self._attend_to_cache(case)
        if case.max_logit:
            return self._find_max_logit(case)
        if case.budget is not None or case.dropout_p:
            return self._call_operators(case)
        scores = self.scores
        inputs = {"q": self.q, "k": self.k, "v": self.v, "sinks": scores.sinks, "bias": scores.bias}
        leaves = {name: x.detach().requires_grad_() for name, x in inputs.items() if x is not None}
        scores = scores._replace(sinks=leaves.get("sinks"), bias=leaves.get("bias"))
        options: dict[str, Any] = {"mask": self.mask, "lengths": case.lengths, "scores": scores}
        precision = float32_precision("ieee" if case.dtype == IEEE32 else "tf32x3")
        with precision, match_kvcache(case.matched):
            out, lse = attention(list(leaves.values())[:3], causal=case.causal, **options)
        gradients = torch.autograd.grad(out, list(leaves.values()), self.dout)
        named = {f"d{name}": x for name, x in zip(leaves, gradients, strict=True)}
        return {"out": out.detach(), "lse": lse.detach(), **named}

    def _call_operators(self, case: Case) -> Tensors:
        """Call the operators, which have arguments for the budget and the dropout seed."""
        from ..kernels import operators  # noqa: PLC0415 - needs the extension
        from ..kernels.problem import Problem  # noqa: PLC0415
        from ..masks import Band  # noqa: PLC0415

        budget = BUDGET_NOW if case.budget is None else case.budget
        band = Band(right=0) if case.causal else Band()
        problem = Problem(
            band if self.mask is None else self.mask,
            case.head_dim**-0.5,
            scores=self.scores if case.scores else None,
            budget=budget,
            ieee=case.dtype == IEEE32,
            dropout=find_dropout(case, self.q.device),
        )
        out, lse = operators.attend(self.q, self.k, self.v, problem)
        saved = self.q, self.k, self.v, out, lse
        gradients = operators.differentiate(self.dout, saved, None, problem)
        of_bias = None
        if self.scores.bias is not None:
            of_bias = operators.differentiate_bias(self.dout, saved, None, problem)
        return name_results(out, lse, *gradients, of_bias)

    def _find_max_logit(self, case: Case) -> Tensors:
        """Return out, lse and the largest score of each head."""
        from ..attention.batched import flash_attn_func  # noqa: PLC0415 - needs the extension

        with float32_precision("ieee" if case.dtype == IEEE32 else "tf32x3"):
            out, lse, max_logit = flash_attn_func(
                self.q, self.k, self.v, causal=case.causal, return_lse=True, return_max_logit=True
            )
        return {**name_results(out, lse), MAX_LOGIT: max_logit}

    def _attend_to_cache(self, case: Case) -> Tensors:
        """Attend to a KV cache; if it has pages, they are stored in reverse order."""
        from ..attention.decoding.kvcache import flash_attn_with_kvcache  # noqa: PLC0415
        from ..attention.decoding.latent import flash_mla_with_kvcache  # noqa: PLC0415

        k, v, table = self.k, self.v, None
        new: dict[str, Any] = _name_arguments(self.scores)
        if case.appended:
            before = case.seqlen_k - case.appended
            new |= {"k": k[:, before:], "v": v[:, before:], "cache_seqlens": before}
            k, v = (x.clone() for x in (k, v))
            for x in (k, v):
                x[:, before:] = torch.nan
        if case.page != WHOLE:
            pages = case.batch * case.seqlen_k // case.page
            table = torch.arange(pages - 1, -1, -1, dtype=torch.int32, device=k.device)
            table = table.reshape(case.batch, -1)
            k, v = (x.reshape(pages, case.page, *x.shape[2:]).flip(0) for x in (k, v))
        if case.latent:
            width = v.shape[-1]
            results = flash_mla_with_kvcache(self.q, k, table, None, width, causal=case.causal)
        else:
            new |= {"block_table": table, "causal": case.causal, "return_softmax_lse": True}
            results = flash_attn_with_kvcache(self.q, k, v, **new)
        return name_results(*results)

    def attend_exactly(self, case: Case, dtype: torch.dtype) -> Tensors:
        """Return the results of the textbook formulas on the CPU, every step rounded to `dtype`."""
        visible = find_visible(case)
        tensors = (self.q, self.k, self.v, self.dout)
        return attend(
            tensors,
            causal=case.causal,
            dtype=dtype,
            visible=visible,
            scores=self.scores,
            dropout=find_dropout(case, torch.device("cpu")),
        )


def find_dropout(case: Case, device: torch.device) -> Dropout | None:
    """Return the dropout of a case; None without dropout."""
    if not case.dropout_p:
        return None
    return Dropout(case.dropout_p, torch.tensor(_RNG_STATE, device=device))


def _name_arguments(scores: Scores) -> dict[str, Any]:
    """Return softcap, ALiBi slopes and sinks as keyword arguments of attention."""
    return {
        "softcap": scores.softcap,
        "alibi_slopes": scores.alibi_slopes,
        "learnable_sink": scores.sinks,
    }


def load_attention() -> Attention:
    """Return the function that cases call; with `lengths`, the batch is one row of documents."""
    from ..attention.batched import flash_attn_func  # noqa: PLC0415 - needs the extension
    from ..attention.packed import flash_attn_varlen_func  # noqa: PLC0415

    def attention(
        inputs: Sequence[Tensor],
        *,
        causal: bool,
        mask: BlockMask | None,
        lengths: tuple[int, ...],
        scores: Scores,
    ) -> tuple[Tensor, Tensor]:
        q, k, v = inputs
        options = {"causal": causal, "return_lse": True, **_name_arguments(scores)}
        if not lengths:
            out, lse = flash_attn_func(q, k, v, mask=mask, bias=scores.bias, **options)
            return out, lse
        ends = torch.tensor(cu_seqlens(lengths), dtype=torch.int32, device=q.device)
        longest = max(lengths)
        packed = (q[0], k[0], v[0], ends, ends, longest, longest)
        out, lse = flash_attn_varlen_func(*packed, **options)
        return out[None], lse[None]

    return attention
