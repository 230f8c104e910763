"""`with flash_dist.sdpa():` replaces torch's scaled_dot_product_attention by ours.

torch's flash backend supports neither masks nor float32 nor Turing, so `activate` has no effect on
such calls. This module replaces the function itself, in torch.nn.functional, where torch's modules
and most libraries look it up in every call.
"""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
from torch.nn import functional

from ...attention.arguments import SCALES, choose_scale, is_transformed, prepare_inputs
from ...attention.autograd import attend
from ...attention.dropout.choice import choose_dropout, may_drop
from ...attention.layouts import DENSE, TORCH
from ...attention.scores import read_bias
from ...attention.sdpa import TOP_LEFT, read_causal_bias, to_torch
from ...attention.support import require_kernels
from ...kernels.choices import is_ieee
from ...kernels.problem import Problem
from ...kernels.scores import Scores
from ...masks import Band, BlockMask, IntervalMask
from .masks import is_unread, read_mask
from .reasons import tell

if TYPE_CHECKING:
    from types import TracebackType

Tensor = torch.Tensor
Own = BlockMask | IntervalMask

_NAME: Final = "scaled_dot_product_attention"
_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)  # types that our operators take directly
_OWN: Final = (BlockMask, IntervalMask)  # masks that torch does not support

# torch's function, for unsupported calls outside of all contexts. A module that imported our
# function inside a context (`from torch.nn.functional import ...`) may call it later.
_OUTSIDE: Final[Any] = getattr(functional, _NAME)

_lock: Final = threading.Lock()
_found: Final[list[Any]] = []  # the function that each open context replaced; the first is torch's


class sdpa(ContextDecorator):  # noqa: N801 - reads as a function: `with sdpa():`
    """Use these kernels in calls of `torch.nn.functional.scaled_dot_product_attention`.

    Use it as a context (`with flash_dist.sdpa():`) or a decorator (`@flash_dist.sdpa()`); contexts
    may be nested. It affects all threads of the process, because autograd recomputes checkpointed
    layers in other threads. Such a recomputation must happen inside the context, too. Modules that
    imported the function by name (`from torch.nn.functional import ...`) are not affected. Code
    that torch.compile has already compiled is compiled again. Enter the context outside of compiled
    code.

    Supported are float16, bfloat16 and float32, on the CPU also float64; boolean masks, and float
    masks, which are added to the scores and may need a gradient (-65504 and less, including -inf,
    mask a key); torch's CausalBias; BlockMasks and IntervalMasks; `is_causal`, `scale`,
    `enable_gqa` and dropout. Other calls go to torch's function: a head_dim over 512 (over 256 in
    float32, with dropout and on compute capability 7.5), bfloat16 on compute capability 7.5,
    tensors and masks of other types, calls under transforms of torch.func, and boolean masks under
    torch.compile, which cannot read them, or under torch.jit.trace, which would store them. The
    logger `flash_dist` logs each reason once, at level INFO.

    A tensor mask is read in the first call that uses it, which waits for the GPU; a mask that is a
    new tensor in every call is read in every call. A float mask that only masks keys is faster than
    a bias. A query without visible keys gives zero.

    Raises:
        ValueError: In an unsupported call with a BlockMask or IntervalMask, which torch does not
            support.
        FlashDistError: In a call for which this build has no code that runs on the GPU, or which
            is captured by a CUDA graph and has a mask that has not been read yet.
    """

    def __enter__(self) -> None:
        """Replace torch's function by ours."""
        with _lock:
            _found.append(getattr(functional, _NAME))
            setattr(functional, _NAME, attend_or_leave)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore torch's function if no other context is open."""
        with _lock:
            found = _found.pop()
            if not _found:
                setattr(functional, _NAME, found)


def attend_or_leave(  # noqa: PLR0913, PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Own | Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    scale: float | None = None,
    enable_gqa: bool = False,  # noqa: FBT001, FBT002
) -> Tensor:
    """Call our kernels if they support the call, else torch's function."""
    tensors = query, key, value
    flags = dropout_p, is_causal
    causal = read_causal_bias(attn_mask, is_causal=is_causal)
    mask = attn_mask if causal is None else causal
    call = _find_call(tensors, mask, flags, scale=scale, enable_gqa=enable_gqa)
    if isinstance(call, str):
        if isinstance(attn_mask, _OWN):
            _refuse(attn_mask, call)
        tell(call)
        # CausalBias recognises only the function in torch.nn.functional, which is now ours.
        if causal is not None:
            attn_mask, is_causal = to_torch(causal, query, key)
        options = {"scale": scale, "enable_gqa": enable_gqa}
        own = (*_found, _OUTSIDE)[0]
        result: Tensor = own(*tensors, attn_mask, dropout_p, is_causal, **options)
        return result
    out, _ = attend(*call, wants_lse=False)
    out = out.transpose(1, 2)
    return out.squeeze(0) if query.dim() == 3 else out  # noqa: PLR2004


def _find_call(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Band | Own | Tensor | None,
    flags: tuple[float, bool],
    *,
    scale: float | None,
    enable_gqa: bool,
) -> tuple[Tensor, Tensor, Tensor, Problem] | str:
    """Return the arguments of `attend`, or a string that says why the call is not supported."""
    dropout_p, is_causal = flags
    query, key, value = tensors
    reason = _find_reason(tensors, mask, dropout_p, scale)
    if reason or (is_causal and mask is not None):
        return reason or "a mask together with is_causal"
    if query.dim() == 3:  # noqa: PLR2004
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    if query.shape[1] != key.shape[1] and not enable_gqa:
        return "heads that differ without enable_gqa"
    try:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        q, k, v = prepare_inputs(q, k, v, DENSE, TORCH)
        if q.device.type == "cuda" and not torch.compiler.is_compiling():
            ieee = is_ieee(None) and q.dtype == torch.float32
            require_kernels(
                q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=ieee, name=TORCH.q
            )
    except (TypeError, ValueError) as error:
        return f"this call: {str(error).partition(', got')[0]}"  # no sizes: new texts are logged
    found: Band | Own = mask if isinstance(mask, (Band, *_OWN)) else Band()
    if is_causal:
        found = TOP_LEFT
    scores = None
    if isinstance(mask, torch.Tensor):
        shape = query.shape[0], query.shape[1], query.shape[2], key.shape[2]
        if not _broadcasts(mask, shape) or not (mask.dtype == torch.bool or _is_added(mask, query)):
            return "masks of other shapes or dtypes"
        hides = None if is_unread(mask) else read_mask(mask, shape)
        if hides is None:
            scores = Scores(bias=read_bias("attn_mask", mask, q, shape))
        else:
            found = hides
    softmax_scale = choose_scale(scale, q.shape[-1], "scale")
    dropout = choose_dropout(q, dropout_p)
    return q, k, v, Problem.of(q, found, softmax_scale, scores=scores, dropout=dropout)


def _is_added(mask: Tensor, query: Tensor) -> bool:
    """Return whether torch's function accepts a float mask of this device and dtype."""
    return mask.device == query.device and mask.dtype in {query.dtype, torch.float32}


def _refuse(mask: Own, reason: str) -> NoReturn:
    """Raise ValueError for an unsupported call whose mask torch's function does not support."""
    sizes = "batch, num_heads_q, seqlen_q, seqlen_k" if isinstance(mask, BlockMask) else ""
    message = (
        f"attn_mask must be a tensor or None where torch's own attention is called, got a "
        f"{type(mask).__name__}: flash_dist has no kernel for {reason}\n\n"
        f"hint: `attn_mask.visible({sizes})` is a tensor"
    )
    raise ValueError(message)


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a mask has 1 to 4 axes, each of size 1 or the same size as in `shape`."""
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    fits = all(has == 1 or has == wants for has, wants in sizes)  # noqa: PLR1714 - may be symbolic
    return 1 <= mask.dim() <= len(shape) and fits


def _find_reason(
    tensors: tuple[Tensor, Tensor, Tensor],
    mask: Band | Own | Tensor | None,
    dropout_p: float,
    scale: float | None,
) -> str:
    """Return why a call is not supported; empty if it may be supported."""
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return "what is no tensor"
    if not (mask is None or isinstance(mask, (torch.Tensor, Band, *_OWN))):
        return "masks that are no tensors"
    dims = {x.dim() for x in tensors}
    reasons = {
        "tensors of other types than torch.Tensor": any(
            type(x) not in _PLAIN or x.is_nested for x in tensors
        ),
        "masks of other types than torch.Tensor": (
            isinstance(mask, torch.Tensor) and type(mask) not in _PLAIN
        ),
        "tensors of other than 3 or 4 dimensions": dims not in ({3}, {4}),
        "a dropout_p that is not at least 0 and less than 1": not 0.0 <= dropout_p < 1.0,
        "dropout that has no kernel": dropout_p != 0.0 and not may_drop(tensors[0]),
        "a scale that is not positive": scale is not None and not SCALES[0] < scale < SCALES[1],
        "transforms of torch.func": is_transformed(),
        "boolean masks of a graph": (
            isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and is_unread(mask)
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
