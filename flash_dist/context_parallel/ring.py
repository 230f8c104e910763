"""Ring attention: every rank keeps its queries, and keys and values are passed around.

Liu, Zaharia, Abbeel, "Ring Attention with Blockwise Transformers", arXiv:2310.01889, with chunks in
zigzag order. Rank r uses the keys of r, r - 1, and so on, and merges the results in that order. The
sums for a rank's dk and dv are passed around with its keys. So no bit depends on timing. Packed
documents are handled by documents.py instead, because most of their keys are visible to few ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._functorch import unwrap_if_dead
from torch.autograd.function import once_differentiable

from ..attention.arguments import choose_scale, is_transformed, prepare_inputs, require_tensor
from ..attention.autograd import cut_head_dim, pad_head_dims
from ..attention.layouts import dtype_name
from ..attention.results import choose_result
from ..attention.support import require_kernels
from ..errors import FlashDistError
from ..kernels import operators
from ..kernels.boundaries import is_checking
from ..kernels.budget import workspace_budget
from ..kernels.choices import IEEE, TF32X3, find_match_kvcache, is_ieee
from ..kernels.problem import Problem
from ..masks.band import Band
from ..masks.inputs import require_bools
from .documents import attend_documents
from .exchange import Ring
from .merge import add_attention
from .parts import choose_parts, require_one_loss
from .shards import require_chunks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.distributed import ProcessGroup

    from ..attention.results import Result
    from ..kernels.choices import Precision
    from .exchange import Tensors
    from .parts import Part

Tensor = torch.Tensor


def ring_attention(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: ProcessGroup | None = None,
    causal: bool = False,
    first_key: Tensor | None = None,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    float32_precision: Precision | None = None,
) -> Result:
    """Attention of this rank's queries to the keys of all ranks of a process group.

    Each rank passes its keys and values to the next one while it computes. With `first_key`, ranks
    send each other visible keys only. For that the host waits once per call, until all ranks have
    called and the GPU has done its earlier work; a CUDA graph cannot capture this. With `causal`,
    tokens must be distributed as `ring_shard` does, so that all ranks have equal work, apart from
    the lengths of documents; without `causal`, any distribution works. All ranks must call this
    function in the same order and with the same shapes, forward and backward. A rank that raises,
    computes without gradients or does not use the result in its loss makes the other ranks wait.
    The result equals attention on one GPU except for the rounding of each rank's partial result to
    the dtype of q. It has the same bits on every run. torch.compile leaves this function out of its
    graphs.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim] or
            [batch, seqlen_q, num_heads_kv, heads_per_kv, head_dim], this rank's tokens; dtypes and
            layouts as in `flash_attn_func`.
        k: [batch, seqlen_k, num_heads_kv, head_dim], this rank's tokens.
        v: [batch, seqlen_k, num_heads_kv, head_dim_v].
        group: The ranks, in their order; by default all. NCCL for tensors on GPUs, gloo on the CPU.
        causal: A token sees itself and earlier tokens of the whole sequence. seqlen_q must be
            seqlen_k and even.
        first_key: With causal: the first token of the whole sequence that each query sees, for
            example the first token of its document. [seqlen_q] or [batch or 1, seqlen_q], int32 or
            int64, on the device of q. Use `ring_shard` to get this rank's part of a tensor for all
            tokens. Defaults to 0.
        softmax_scale: Factor on the scores, positive. Defaults to head_dim ** -0.5.
        return_lse: Return (out, lse).
        batch_invariant: As in `flash_attn_func`.
        float32_precision: As in `flash_attn_func`; the same on every rank.

    Returns:
        out: Like q, with head_dim_v, contiguous.
        lse: [batch, num_heads_q, seqlen_q], float32 (float64 for float64 inputs), over the keys of
            all ranks; only if `return_lse`. Differentiable.

    Raises:
        TypeError: An argument is not a tensor, or a dtype is not supported.
        ValueError: Shapes, devices, alignment or softmax_scale do not fit.
        GroupError: torch.distributed is not initialized, this rank is not in the group, or its
            backend does not take q's device. With `FLASH_DIST_CHECK=1`, which makes ranks wait,
            also: ranks call with different shapes or options, or only some ranks need gradients.
        FlashDistError: This build has no code that runs on the GPU; the message names the arch
            set to install. Or `flash_dist.match_kvcache` is on, or a CUDA graph captures
            first_key.
    """
    if is_transformed():
        message = "ring_attention does not support transforms of torch.func (grad, vjp, vmap)"
        raise FlashDistError(message, hint="use `loss.backward()` or `torch.autograd.grad`")
    require_bools(causal=causal, return_lse=return_lse, batch_invariant=batch_invariant)
    if find_match_kvcache():
        message = "match_kvcache must be False around ring_attention, got True"
        raise FlashDistError(message, hint="it rounds out between ranks, which no cache does")
    # Tensors may still be wrapped by a transform of torch.func that has ended.
    q, k, v = map(unwrap_if_dead, prepare_inputs(q, k, v))
    ring = Ring.of(group, q.device)
    scale = choose_scale(softmax_scale, q.shape[-1])
    ieee = is_ieee(float32_precision) and q.dtype == torch.float32
    if is_checking():
        with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        ring.require_same(
            _describe(q, k, v),
            f"causal {causal} {'with' if first_key is not None else 'without'} first_key",
            f"softmax_scale {scale}",
            f"float32_precision {IEEE if ieee else TF32X3}",
            f"{'with' if with_gradients else 'without'} gradients",
        )
    if causal:
        _require_pairs(q, k)
    if first_key is not None:
        _require_first_key(first_key, q, causal=causal)
    if q.device.type == "cuda":
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=ieee)
    head_dim_v = v.shape[-1]
    q, k, v = pad_head_dims(q, k, v)
    how: dict[str, Any] = {"batch_invariant": bool(batch_invariant), "ieee": ieee}
    problem = Problem(Band(), scale, budget=workspace_budget(), **how)
    if first_key is None:
        parts = choose_parts(ring, k.shape[1], causal=causal)
        out, lse = _attend(q, k, v, (ring, problem, parts))
    else:
        out, lse = attend_documents(q, k, v, (ring, problem), first_key)
    return choose_result(cut_head_dim(out, head_dim_v), lse, return_lse=return_lse)


def _describe(*tensors: Tensor) -> str:
    """Describe the properties that must be equal on every rank."""
    return ", ".join(
        f"{name} {list(x.shape)} {dtype_name(x.dtype)}"
        for name, x in zip(("q", "k", "v"), tensors, strict=True)
    )


def _require_pairs(q: Tensor, k: Tensor) -> None:
    if q.shape[1] != k.shape[1]:
        message = (
            "with causal a rank has as many queries as keys, "
            f"got seqlen_q {q.shape[1]} and seqlen_k {k.shape[1]}"
        )
        raise ValueError(message)
    require_chunks(q.shape[1], 2)


def _require_first_key(first_key: Tensor, q: Tensor, *, causal: bool) -> None:
    require_tensor("first_key", first_key)
    if not causal:
        message = "first_key must be None without causal, got a tensor"
        raise ValueError(message)
    if first_key.dtype not in {torch.int32, torch.int64}:
        message = f"first_key must be int32 or int64, got {dtype_name(first_key.dtype)}"
        raise TypeError(message)
    batch, seqlen = q.shape[:2]
    shape = list(first_key.shape)
    if shape not in ([seqlen], [1, seqlen], [batch, seqlen]):
        message = f"first_key must have shape [{seqlen}] or [{batch} or 1, {seqlen}], got {shape}"
        raise ValueError(message)
    if first_key.device != q.device:
        message = (
            f"q and first_key must be on the same device, got {q.device} and {first_key.device}"
        )
        raise ValueError(message)


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def _attend(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    out, lse = _RingAttention.apply(*arguments)  # type: ignore[no-untyped-call]
    return out, lse


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: tuple[Ring, Problem, list[Part]],
    ) -> tuple[Tensor, Tensor]:
        ring, problem, parts = call
        held: Tensors = k.contiguous(), v.contiguous()
        coming = ring.pass_on(*held)
        for step, part in enumerate(parts):
            rows, (one_k, one_v) = part.rows, (x[:, part.keys] for x in held)
            one = operators.attend(q[:, rows], one_k, one_v, problem._replace(mask=part.mask))
            del one_k, one_v  # drop views, so that `held` can be freed
            if step + 1 < ring.size:
                held = coming.wait()
            if step + 2 < ring.size:  # before merging: see `Ring.pass_on`
                coming = ring.pass_on(*held)
            if step == 0:
                out, lse = one[0].to(one[1].dtype), one[1]
            else:
                add_attention(out[:, rows], lse[..., rows], *one)
            del one
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        require_one_loss(dout, dlse)
        q, k, v, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else dout
        ring, problem, parts = ctx.call
        held: Tensors = k.contiguous(), v.contiguous()
        coming = ring.pass_on(*held)
        for step, part in enumerate(parts):
            rows, (one_k, one_v) = part.rows, (x[:, part.keys] for x in held)
            # Not `differentiate`: it would treat a part with one key as if no other keys existed.
            results = out[:, rows].contiguous(), lse[..., rows].contiguous()
            one, *others, _ = operators.backward(
                dout[:, rows],
                (q[:, rows], one_k, one_v, *results),
                None if dlse is None else dlse[..., rows],
                problem._replace(mask=part.mask),
            )
            del one_k, one_v  # drop views, so that `held` can be freed
            # k and v of the next step, if any; after step 0, also dk and dv of the keys used here.
            received = coming.wait()
            held, sums = received[:2], received[-2:]
            if step == 0:
                dq, *own = (x.to(lse.dtype).contiguous() for x in (one, *others))
                sums = tuple(own)
                del own
            else:
                _add(sums, others, part.keys)
            passed = held if step + 2 < ring.size else ()
            coming = ring.pass_on(*passed, *sums)  # before summing dq: see `Ring.pass_on`
            if step > 0:
                _add([dq], [one], rows)
            del one, others, passed, received
        dk, dv = coming.wait()  # gradients of this rank's keys, summed by all ranks
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _add(sums: Iterable[Tensor], others: Iterable[Tensor], tokens: slice) -> None:
    for total, x in zip(sums, others, strict=True):
        total[:, tokens] += x
