"""The operators of attention: loads the extension, declares more operators, and calls them.

Importing this module loads the extension, which declares `attention` and `attention_backward` with
their CUDA kernels. These two take a mask as integers, and its arrays as a tensor on q's device.
This module declares the `attention_masked...` operators. They take the handle of a BlockMask or the
tensor of an IntervalMask, and find the arrays in code that torch.compile does not trace. This
module also has the fake kernels, which torch.compile calls for shapes. cpu.py has the CPU kernels,
derivatives.py the autograd formulas. The signatures are those of the operators, including
positional flags.

The extension's `attention_no_grad` and `attention_backward_no_grad` have no autograd formula, and
take the integers of a mask as a CPU tensor. Eager calls use them, because they are cheaper.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import torch

from ..masks import registry
from ..masks.band import Band
from ..masks.inputs import complain
from ..masks.intervals import IntervalMask, list_integers, list_key_slots
from ..masks.spec import BlockMask
from ..toolkit.builds.package import PACKAGE
from ..toolkit.errors import ExtensionError
from ..toolkit.product import BINDING
from . import cpu, derivatives, earlier
from .boundaries import is_checking, warn_unchecked
from .cpu import shape_of
from .dropout.state import NOT_DROPPED
from .memory import raise_out_of_memory
from .problem import NOT_PACKED, Problem
from .rules import flops, sharding
from .scores import PLAIN, Scores, count_splits, sum_parts

if TYPE_CHECKING:
    from collections.abc import Callable

    from .derivatives import Gradients, Saved

EXTENSION: Final = PACKAGE / BINDING

# The extension has no Python API, so that building it needs no Python headers. Loading it registers
# the operators.
try:
    torch.ops.load_library(str(EXTENSION))
except OSError as error:
    _MESSAGE = f"the compiled extension does not load: {error.__cause__ or error}"
    raise ExtensionError(_MESSAGE, hint="`python -m flash_dist doctor` finds the cause") from error

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]
Results = tuple[Tensor, ...]  # out and lse, and max_logit if the Problem asks for it

_operators: Final[Any] = torch.ops.flash_dist
_attention: Final = _operators.attention.default
_attention_max_logit: Final = _operators.attention_max_logit.default
_attention_backward: Final = _operators.attention_backward.default
# The C++ callables behind the operators, without torch's Python wrapper.
_attention_no_grad: Final = _operators.attention_no_grad.default._op  # noqa: SLF001
_attention_backward_no_grad: Final = _operators.attention_backward_no_grad.default._op  # noqa: SLF001
_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
# Arguments for a mask: the handle of a BlockMask, or the other four for an IntervalMask.
_MASK: Final = "Tensor? plan, SymInt handle, SymInt batches, SymInt heads, bool causal"
_SCORES: Final = (
    "bool batch_invariant, bool ieee=False, float softcap=0.0, Tensor? alibi_slopes=None, "
    "Tensor? sinks=None, Tensor? bias=None"
)
_LAST: Final = f"{_SCORES}, float dropout_p=0.0, Tensor? rng_state=None"
_SAVED: Final = "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse"
# The names of the arguments in _LAST, except the first one.
_HOW: Final = ("ieee", "softcap", "alibi_slopes", "sinks", "bias", "dropout_p", "rng_state")
_BIAS: Final = (
    "float softmax_scale, bool ieee, Tensor? alibi_slopes, Tensor bias, float dropout_p, "
    "Tensor? rng_state"
)
_PACKED: Final = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, SymInt max_seqlen_q=0, "
    "SymInt max_seqlen_k=0"
)

_MASKED: Final = f"Tensor q, Tensor k, Tensor v, {_MASK}, float softmax_scale, bool keep"

_library.define(f"attention_masked({_MASKED}, {_LAST}) -> (Tensor out, Tensor lse)")
_library.define(
    f"attention_masked_max_logit({_MASKED}, {_SCORES}) -> "
    "(Tensor out, Tensor lse, Tensor max_logit)"
)
_library.define(
    f"attention_masked_backward({_SAVED}, {_MASK}, float softmax_scale, int budget, {_LAST}) -> "
    "(Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)"
)
_library.define(
    f"attention_bias_backward({_SAVED}, Tensor? mask_data, int[] mask, {_BIAS}, {_PACKED}) -> "
    "Tensor"
)
_library.define(f"attention_masked_bias_backward({_SAVED}, {_MASK}, {_BIAS}) -> Tensor")
_attention_masked: Final = _operators.attention_masked.default
_attention_masked_max_logit: Final = _operators.attention_masked_max_logit.default
_attention_masked_backward: Final = _operators.attention_masked_backward.default
_attention_bias_parts: Final = _operators.attention_bias_parts.default
_attention_bias_backward: Final = _operators.attention_bias_backward.default
_attention_masked_bias_backward: Final = _operators.attention_masked_bias_backward.default

for _name in (
    "attention",
    "attention_max_logit",
    "attention_backward",
    "attention_no_grad",
    "attention_backward_no_grad",
    "attention_masked",
    "attention_masked_max_logit",
    "attention_masked_backward",
    "attention_bias_backward",
    "attention_masked_bias_backward",
):
    torch.library.impl(f"flash_dist::{_name}", "CPU", getattr(cpu, _name))
derivatives.register(_library)


# --- Calls ----------------------------------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Results:
    """Return out, lse and, if the problem asks for it, max_logit; gradients: see derivatives.py.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim] or [batch, seqlen_q, num_heads_kv, group,
            head_dim]; packed, without the batch axis.
        k: [batch, seqlen_k, num_heads_kv, head_dim]; packed, without the batch axis.
        v: Like k, with head_dim_v.
        problem: All other arguments.

    Returns:
        out: Like q with head_dim_v, contiguous.
        lse: [batch, num_heads_q, seqlen_q]; packed, [num_heads_q, total_q].
        max_logit: [num_heads_q], dtype of lse; without a gradient.
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return attend_no_grad(q, k, v, problem)
    try:
        return _call_forward(q, k, v, problem)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def attend_no_grad(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Results:
    """Return the results of `attend`, for an eager call that needs no gradients.

    The call may be inside an autograd.Function. It skips the Python autograd formulas of operators:
    their check whether a gradient is needed takes as long as the rest of a small call.
    """
    try:
        mask, softmax_scale, packing, scores, _, _, ieee, *choices = problem
        more = scores is not None or any(choices)
        if more or _is_watched(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library does
                return _call_forward(q, k, v, problem)
        integers, data, _ = _find_integers(mask, q, k)
        last = packing or ()
        results: Pair = _attention_no_grad(q, k, v, integers, data, softmax_scale, ieee, *last)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return results


def _call_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Results:
    """Call `attention` or `attention_masked`, or its variant with max_logit."""
    mask, softmax_scale, packing, scores, _, batch_invariant, *choices, dropout = problem
    ieee, match_kvcache, max_logit = choices
    known = band_or_handle(mask)
    last = dropout or ()
    if isinstance(known, Band):
        operator = _attention_max_logit if max_logit else _attention
        how: tuple[Any, ...] = (ieee,)
        if max_logit:
            how = ieee, *(scores or ())
        elif match_kvcache or scores is not None or last:
            *of_heads, bias = scores or PLAIN
            how = ieee, *of_heads, match_kvcache, bias
        packed = packing or NOT_PACKED
        results: Results = operator(q, k, v, None, known.ints, *packed, softmax_scale, *how, *last)
    else:
        operator = _attention_masked_max_logit if max_logit else _attention_masked
        how = ieee, *(scores or (PLAIN if last else ()))
        choices = [torch.compiler.is_compiling(), batch_invariant]
        results = operator(q, k, v, *known, softmax_scale, *choices, *how, *last)
    return results


def _is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether other code may intercept the operator, or the call is not for a GPU.

    torch.dispatch modes, Tensor subclasses and torch.jit.trace should get the operators that have
    autograd formulas. On the CPU, the operators without formulas save no time.
    """
    return not (
        type(q) is type(k) is type(v) is Tensor
        and q.is_cuda
        and torch._C._len_torch_dispatch_stack() == 0  # noqa: SLF001
        and torch._C._get_tracing_state() is None  # noqa: SLF001 - inlined `registry.is_traced`
    )


def _find_integers(
    mask: Band | BlockMask | IntervalMask, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return mask, mask_data and mask_slots for the operators without autograd."""
    if isinstance(mask, Band):
        return _integers_of(mask), None, None
    if isinstance(mask, BlockMask):
        band = mask.band
        if band is not None:
            return _integers_of(band), None, None
        found = find_plan(mask.handle, q, k)
        if found is not None:
            return found.plan.numbers, found.data, found.plan.key_slots
    elif 0 not in (q.shape[0], mask.seqlen_q, mask.seqlen_k):
        slots = list_key_slots(mask.seqlen_q, mask.seqlen_k, causal=mask.causal)
        return list_integers(*mask[1:5]), mask.plan, slots
    return _integers_of(Band()), None, None  # the score matrix is empty, so any mask is correct


@lru_cache(maxsize=256)
def _integers_of(band: Band) -> Tensor:
    """Return the operators' integers of a band, as a cached tensor: do not write to it."""
    return torch.tensor(band.ints, dtype=torch.int64, device="cpu")


def backward(dout: Tensor, saved: Saved, dlse: Tensor | None, problem: Problem) -> Gradients:
    """Return dq, dk, dv and dsinks of a call; `differentiate` sums dsinks over all queries.

    Args:
        dout: Gradient of out.
        saved: q, k, v, out and lse.
        dlse: Gradient of lse; None: nothing depends on it.
        problem: The problem of the forward.

    Returns:
        dq, dk, dv: Like q, k and v, contiguous.
        dsinks: Like lse: each query's part of the gradient of its head's sink, in float32 (float64
            for float64 inputs). Without sinks, dsinks is None or an empty tensor.
    """
    try:
        # Call the operator with its autograd formula.
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return _call_backward(dout, saved, dlse, problem)
        plain = problem.scores is None and problem.dropout is None
        if plain and not _is_watched(*saved[:3]):
            return _backward_no_grad(dout, saved, dlse, problem)
        with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library does
            return _call_backward(dout, saved, dlse, problem)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def _backward_no_grad(
    dout: Tensor, saved: Saved, dlse: Tensor | None, problem: Problem
) -> Gradients:
    """Call the operator without an autograd formula, as `attend_no_grad` does."""
    # The operator does not take the fields named _.
    mask, softmax_scale, packing, _, *how, _, _, _ = problem
    arrays = _find_integers(mask, *saved[:2])
    dq, dk, dv = _attention_backward_no_grad(
        dout, *saved, dlse, *arrays, softmax_scale, *how, *(packing or ())
    )
    return dq, dk, dv, None


def _call_backward(dout: Tensor, saved: Saved, dlse: Tensor | None, problem: Problem) -> Gradients:
    """Call `attention_backward` or `attention_masked_backward`."""
    mask, softmax_scale, packing, scores, *how, _, _, dropout = problem
    numbers = softmax_scale, *how, *(scores or PLAIN), *(dropout or ())
    known = band_or_handle(mask)
    if isinstance(known, Band):
        arrays = None, None, known.ints, *(packing or NOT_PACKED)
        gradients: Gradients = _attention_backward(dout, *saved, dlse, *arrays, *numbers)
    else:
        gradients = _attention_masked_backward(dout, *saved, dlse, *known, *numbers)
    return gradients


def differentiate(
    dout: Tensor | None, saved: Saved, dlse: Tensor | None, problem: Problem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return dq, dk, dv and the gradient of the sinks for autograd's gradients of out and lse.

    Args:
        dout: In any layout; None: nothing depends on out.
        saved: q, k, v, out and lse.
        dlse: In any layout; None: nothing depends on lse.
        problem: The problem of the forward.
    """

    def call(one_dout: Tensor, one_dlse: Tensor | None) -> Gradients:
        return backward(one_dout, saved, one_dlse, problem)

    sinks = None if problem.scores is None else problem.scores.sinks
    longest = None if problem.packing is None else problem.packing.max_seqlen_k
    return derivatives.differentiate(call, saved, (dout, dlse), sinks=sinks, max_seqlen_k=longest)


def differentiate_bias(
    dout: Tensor | None, saved: Saved, dlse: Tensor | None, problem: Problem
) -> Tensor:
    """Return the gradient of the bias, in the shape of bias; arguments as in `differentiate`."""
    mask, softmax_scale, packing, scores, *_ = problem
    _, alibi_slopes, sinks, bias = scores or PLAIN
    known = band_or_handle(mask)
    how = softmax_scale, problem.ieee, alibi_slopes, bias, *(problem.dropout or NOT_DROPPED)
    longest = None if packing is None else packing.max_seqlen_k

    def call(one_dout: Tensor, one_dlse: Tensor | None) -> Tensor:
        if isinstance(known, Band):
            last = None, known.ints, *how, *(packing or ())
            found: Tensor = _attention_bias_backward(one_dout, *saved, one_dlse, *last)
        else:
            found = _attention_masked_bias_backward(one_dout, *saved, one_dlse, *known, *how)
        return found

    try:
        return derivatives.differentiate_bias(
            call, saved, (dout, dlse), sinks=sinks, max_seqlen_k=longest
        )
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def is_exporting() -> bool:
    """Return whether torch.export is tracing.

    In older versions, torch.compiler.is_exporting() is also true while torch.compile traces, see
    https://github.com/pytorch/pytorch/issues/176347.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def band_or_handle(
    mask: Band | BlockMask | IntervalMask,
) -> Band | tuple[Tensor | None, int, int, int, bool]:
    """Return the band of a mask, or the masked operators' arguments from `plan` to `causal`.

    The handle of a BlockMask is valid in this process only.
    """
    if isinstance(mask, IntervalMask):
        return mask.plan, 0, mask.batches, mask.heads, mask.causal
    if not isinstance(mask, BlockMask):
        return mask
    if mask.band is not None:
        return mask.band
    if is_exporting() or registry.is_traced():
        recorder = "torch.export" if is_exporting() else "torch.jit.trace"
        raise complain(
            TypeError,
            f"{recorder} takes a mask that is a band only, got {mask!r}: another process would "
            "not find it",
            registry.RECORDED,
        )
    return None, mask.handle, 1, 1, False


# --- Masked operators on a GPU --------------------------------------------------------------------


def find_plan(handle: int, q: Tensor, k: Tensor) -> registry.DevicePlan | None:
    """Return a BlockMask's tensors on q's GPU; None if the score matrix is empty."""
    index, sizes_q, seqlen_k = q.get_device(), q.shape, k.shape[1]
    found = registry.lookup_last(handle, index, sizes_q, seqlen_k)
    if found is None:
        shape = shape_of(q, k)
        if cpu.is_empty(handle, shape):
            return None
        found = registry.lookup(handle, q.device, shape)
        registry.cache_last(handle, index, sizes_q, seqlen_k, found)
    return found


def _find_arrays(
    q: Tensor,
    k: Tensor,
    plan: Tensor | None,
    handle: int,
    *sizes: Any,  # noqa: ANN401
) -> tuple[Tensor | None, Tensor | None, list[int]]:
    """Return mask_data, mask_slots and mask for the extension's operators.

    The visible tiles of an IntervalMask are known on its device only, so a backward reserves memory
    for dS of every tile that `causal` does not mask.
    """
    if plan is None:
        found = find_plan(handle, q, k)
        if found is not None:
            return found.data, found.plan.key_slots, found.plan.layout
    elif 0 not in (q.shape[0], q.shape[1], k.shape[1]):  # empty tensors have no address
        intervals = cpu.intervals_of(q, k, plan, *sizes)
        slots = list_key_slots(q.shape[1], k.shape[1], causal=intervals.causal)
        return plan, slots, intervals.layout
    return None, None, Band().ints


def _masked_on_gpu(*call: Any) -> Pair:  # noqa: ANN401 - the operator's schema
    out, lse = _attend_on_gpu(_attention, *call)
    return out, lse


def _masked_max_logit_on_gpu(*call: Any) -> Results:  # noqa: ANN401 - the operator's schema
    return _attend_on_gpu(_attention_max_logit, *call)


def _attend_on_gpu(  # noqa: PLR0913, PLR0917 - the operators' schema
    operator: Callable[..., Results],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    plan: Tensor | None,
    handle: int,
    batches: int,
    heads: int,
    causal: bool,  # noqa: FBT001
    softmax_scale: float,
    keep: bool,  # noqa: FBT001
    batch_invariant: bool,  # noqa: ARG001, FBT001 - only for the backward
    *how: Any,  # noqa: ANN401
) -> Results:
    if keep and plan is None:
        registry.cache(handle)
    data, _, integers = _find_arrays(q, k, plan, handle, batches, heads, causal)
    named = dict(zip(_HOW, how, strict=False))  # torch omits arguments equal to their default
    return operator(q, k, v, data, integers, *NOT_PACKED, softmax_scale, **named)


def _masked_backward_on_gpu(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    arrays = _find_arrays(*call[1:3], *call[7:12])
    gradients: Gradients = _attention_backward(*call[:7], *arrays, *NOT_PACKED, *call[12:])
    return gradients


def _bias_backward_on_gpu(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    q, k, bias = call[1], call[2], call[12]
    splits = count_splits(bias, q, k, call[15:])
    return sum_parts(_attention_bias_parts(*call[:13], splits, *call[13:]), bias)


def _masked_bias_backward_on_gpu(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    data, _, integers = _find_arrays(*call[1:3], *call[7:12])
    return _bias_backward_on_gpu(*call[:7], data, integers, *call[12:])


torch.library.impl("flash_dist::attention_bias_backward", "CUDA", _bias_backward_on_gpu)
torch.library.impl(
    "flash_dist::attention_masked_bias_backward", "CUDA", _masked_bias_backward_on_gpu
)
torch.library.impl("flash_dist::attention_masked", "CUDA", _masked_on_gpu)
torch.library.impl("flash_dist::attention_masked_max_logit", "CUDA", _masked_max_logit_on_gpu)
torch.library.impl("flash_dist::attention_masked_backward", "CUDA", _masked_backward_on_gpu)


# --- Shapes, for torch.compile --------------------------------------------------------------------


def outputs_like(q: Tensor, v: Tensor, *, packed: bool) -> Pair:
    """Return out and lse, uninitialized."""
    tokens = 1 if packed else 2  # axes before the heads
    *batch, seqlen_q = q.shape[:tokens]
    heads = math.prod(q.shape[tokens:-1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype)


def _attention_fake(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _mask_data: Tensor | None,
    _mask: list[int],
    cu_seqlens_q: Tensor | None,
    *_: object,
) -> Pair:
    """Return out and lse of the right shape; warn if cu_seqlens cannot be checked."""
    packed = cu_seqlens_q is not None
    if packed and q.device.type == "cuda" and is_checking():
        warn_unchecked("a compiled graph")
    return outputs_like(q, v, packed=packed)


def _attention_masked_fake(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> Pair:
    return outputs_like(q, v, packed=False)


def _attention_max_logit_fake(*call: Any) -> Results:  # noqa: ANN401 - the operator's schema
    out, lse = _attention_fake(*call)
    return out, lse, _max_logit_like(lse)


def _attention_masked_max_logit_fake(*call: Any) -> Results:  # noqa: ANN401 - the operator's schema
    out, lse = _attention_masked_fake(*call)
    return out, lse, _max_logit_like(lse)


def _max_logit_like(lse: Tensor) -> Tensor:
    return lse.new_empty(lse.shape[-2])


def _attention_no_grad_fake(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _mask: Tensor,
    _mask_data: Tensor | None,
    _softmax_scale: float,
    _ieee: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens_q: Tensor | None = None,
    *_: object,
) -> Pair:
    return outputs_like(q, v, packed=cu_seqlens_q is not None)


def _gradients_fake(
    _dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_backward_fake(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    return *_gradients_fake(*call), _dsinks_like(call[5], *call[18:21])


def _attention_masked_backward_fake(*call: Any) -> Gradients:  # noqa: ANN401 - the operator's schema
    return *_gradients_fake(*call), _dsinks_like(call[5], *call[16:19])


def _bias_backward_fake(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    bias: Tensor = call[12]
    return bias.new_empty(bias.shape)


def _masked_bias_backward_fake(*call: Any) -> Tensor:  # noqa: ANN401 - the operator's schema
    bias: Tensor = call[15]
    return bias.new_empty(bias.shape)


def _dsinks_like(lse: Tensor, *scores: Any) -> Tensor:  # noqa: ANN401
    return lse.new_empty(0 if Scores(*scores).sinks is None else lse.shape)


for _name, _fake in (
    ("attention", _attention_fake),
    ("attention_max_logit", _attention_max_logit_fake),
    ("attention_no_grad", _attention_no_grad_fake),
    ("attention_masked", _attention_masked_fake),
    ("attention_masked_max_logit", _attention_masked_max_logit_fake),
    ("attention_backward", _attention_backward_fake),
    ("attention_backward_no_grad", _gradients_fake),
    ("attention_masked_backward", _attention_masked_backward_fake),
    ("attention_bias_backward", _bias_backward_fake),
    ("attention_masked_bias_backward", _masked_bias_backward_fake),
):
    torch.library.register_fake(f"flash_dist::{_name}", _fake)
earlier.register(_library)
flops.register()
sharding.register()
