"""The registered operators: the only module that knows `torch.ops.flash_dist`.

Importing it loads the extension, which declares `fwd` and `bwd` and has their CUDA kernels. These
take a mask as numbers, and its arrays as a tensor on the device of q. `masked_fwd` and `masked_bwd`
take the handle of a BlockMask instead and find the arrays for the device, out of the sight of
torch.compile. They are declared here, as are the fake kernels of all (shapes only, for
torch.compile); cpu.py has the CPU's, derivatives.py the autograd formulas of these four. The
signatures are the operators' own, flags among the positional arguments included.

`fwd_alone` and `bwd_alone`, the extension's, too, have no formula, and a mask's numbers as a tensor
of the CPU: calls in eager mode take them, which cost less there.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch

from ..masks import registry
from ..masks.band import Band
from ..masks.inputs import complain
from ..masks.spec import BlockMask
from ..toolkit.builds.package import PACKAGE
from ..toolkit.errors import ExtensionError
from ..toolkit.product import BINDING
from . import cpu, derivatives
from .boundaries import is_checking, warn_unchecked
from .cpu import shape_of
from .memory import raise_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

EXTENSION: Final = PACKAGE / BINDING

# The file has no Python API of its own (building it needs no Python headers): loading it registers
# the operators.
try:
    torch.ops.load_library(str(EXTENSION))
except OSError as error:
    _MESSAGE = f"the compiled extension does not load: {error.__cause__ or error}"
    raise ExtensionError(_MESSAGE, hint="`python -m flash_dist doctor` finds the cause") from error

Tensor = torch.Tensor
Gradients = tuple[Tensor, Tensor, Tensor]
# dout, q, k, v, out, lse, dlse
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]

_operators: Final[Any] = torch.ops.flash_dist
# What calling an operator comes to but for a function in Python.
_fwd_alone: Final = _operators.fwd_alone.default._op  # noqa: SLF001
_bwd_alone: Final = _operators.bwd_alone.default._op  # noqa: SLF001
_library: Final = torch.library.Library("flash_dist", "FRAGMENT")
_library.define(
    "masked_fwd(Tensor q, Tensor k, Tensor v, SymInt handle, float softmax_scale, bool keep, "
    "bool ieee=False) -> (Tensor out, Tensor lse)"
)
_library.define(
    "masked_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, "
    "SymInt handle, float softmax_scale, int budget, bool batch_invariant, bool ieee=False) -> "
    "(Tensor dq, Tensor dk, Tensor dv)"
)

for _name in ("fwd", "bwd", "fwd_alone", "bwd_alone", "masked_fwd", "masked_bwd"):
    torch.library.impl(f"flash_dist::{_name}", "CPU", getattr(cpu, _name))
derivatives.register(_library)


class Packing(NamedTuple):
    """Documents packed one behind the other: where each begins, and how long one may be."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    @classmethod
    def of(
        cls,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
    ) -> Packing | None:
        """Return how documents are packed, None where they are not."""
        if cu_seqlens_q is None or cu_seqlens_k is None:
            return None
        return cls(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


NOT_PACKED: Final = (None, None, 0, 0)


def fwd(  # noqa: PLR0913 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Band | BlockMask,
    packing: Packing | None,
    softmax_scale: float,
    ieee: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out and lse.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim] or [batch, seqlen_q, num_heads_kv, group,
            head_dim]; packed, without the batch axis.
        k: [batch, seqlen_k, num_heads_kv, head_dim]; packed, without the batch axis.
        v: Like k, with head_dim_v.
        mask: A band if packed.
        packing: None for tensors with a batch axis.
        softmax_scale: Factor on the scores.
        ieee: Whether products of float32 are FFMA, see precision.py.

    Returns:
        out: Like q with head_dim_v, contiguous.
        lse: [batch, num_heads_q, seqlen_q]; packed, [num_heads_q, total_q].
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return fwd_alone(q, k, v, mask, packing, softmax_scale, ieee)
    try:
        return _fwd_by_name(q, k, v, mask, packing, softmax_scale, ieee)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def fwd_alone(  # noqa: PLR0913, PLR0917 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Band | BlockMask,
    packing: Packing | None,
    softmax_scale: float,
    ieee: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """Return out and lse as `fwd` does, in eager mode, where nobody wants gradients of this call.

    In an autograd.Function that is so. On a GPU the call takes an operator of its own, which has no
    autograd formula in front: that is written in Python, and to find that nobody wants it takes
    longer than all else of a small call.
    """
    try:
        if _is_watched(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001 - as torch.library does
                return _fwd_by_name(q, k, v, mask, packing, softmax_scale, ieee)
        numbers, found = _find_numbers(mask, q, k)
        data = None if found is None else found.data
        packed = () if packing is None else packing
        out, lse = _fwd_alone(q, k, v, numbers, data, softmax_scale, ieee, *packed)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return out, lse


def _fwd_by_name(  # noqa: PLR0913, PLR0917 - one attention problem
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Band | BlockMask,
    packing: Packing | None,
    softmax_scale: float,
    ieee: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """Call `fwd` or `masked_fwd`, which a graph may hold and whoever watches operators knows."""
    known = band_or_handle(mask)
    if isinstance(known, Band):
        packed = packing or NOT_PACKED
        out, lse = _operators.fwd(q, k, v, None, known.ints, *packed, softmax_scale, ieee)
    else:
        keep = torch.compiler.is_compiling()
        out, lse = _operators.masked_fwd(q, k, v, known, softmax_scale, keep, ieee)
    return out, lse


def _is_watched(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether a call is not for a GPU alone: somebody may look at the operator it takes.

    A mode of torch.dispatch, a subclass of Tensor and torch.jit.trace know operators by name. On
    the CPU nothing is won.
    """
    plain = type(q) is type(k) is type(v) is Tensor
    if not plain or not q.is_cuda or torch._C._len_torch_dispatch_stack() > 0:  # noqa: SLF001
        return True
    return registry.is_traced()


def _find_numbers(
    mask: Band | BlockMask, q: Tensor, k: Tensor
) -> tuple[Tensor, registry.Resident | None]:
    """Return a mask's numbers, and its plan with the arrays on the GPU of q, where it has such."""
    if isinstance(mask, BlockMask):
        band = mask.band
        if band is None:
            found = find_resident(mask.handle, q, k)
            if found is not None:
                return found.plan.numbers, found
            band = Band()  # of nothing
        mask = band
    return _numbers_of(mask), None


@lru_cache(maxsize=256)
def _numbers_of(band: Band) -> Tensor:
    """Return the operators' numbers of a band, which nobody writes to."""
    return torch.tensor(band.ints, dtype=torch.int64, device="cpu")


def bwd(  # noqa: PLR0913, PLR0917 - one attention problem
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    mask: Band | BlockMask,
    packing: Packing | None,
    softmax_scale: float,
    budget: int,
    batch_invariant: bool,
    ieee: bool = False,
) -> Gradients:
    """Return dq, dk, dv, each like its tensor and contiguous; budget in bytes, or BUDGET_NOW."""
    saved: Saved = dout, q, k, v, out, lse, dlse
    plan = softmax_scale, budget, batch_invariant, ieee
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        return bwd_alone(saved, mask, packing, plan)
    try:
        return _bwd_by_name(saved, mask, packing, plan)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise


def bwd_alone(
    saved: Saved,
    mask: Band | BlockMask,
    packing: Packing | None,
    plan: Sequence[Any],
) -> Gradients:
    """Return dq, dk, dv in eager mode, where they are not to be differentiated; see `fwd_alone`.

    Args:
        saved: dout and what the forward had and returned, then dlse or None.
        mask: As in `bwd`.
        packing: Likewise.
        plan: softmax_scale, budget, batch_invariant and ieee, likewise.
    """
    _, q, k, v, *_ = saved
    softmax_scale, budget, batch_invariant, ieee = plan
    try:
        if _is_watched(q, k, v):
            with torch._C._AutoDispatchBelowAutograd():  # noqa: SLF001
                return _bwd_by_name(saved, mask, packing, plan)
        numbers, found = _find_numbers(mask, q, k)
        arrays = (None, None) if found is None else (found.data, found.plan.key_slots)
        packed = () if packing is None else packing
        dq, dk, dv = _bwd_alone(
            *saved, numbers, *arrays, softmax_scale, budget, batch_invariant, ieee, *packed
        )
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return dq, dk, dv


def _bwd_by_name(
    saved: Saved, mask: Band | BlockMask, packing: Packing | None, plan: Sequence[Any]
) -> Gradients:
    """Call `bwd` or `masked_bwd`, as `_fwd_by_name` does."""
    known = band_or_handle(mask)
    if isinstance(known, Band):
        packed = packing or NOT_PACKED
        dq, dk, dv = _operators.bwd(*saved, None, None, known.ints, *packed, *plan)
    else:
        dq, dk, dv = _operators.masked_bwd(*saved, known, *plan)
    return dq, dk, dv


def differentiate(  # noqa: PLR0913, PLR0917 - one attention problem
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    *,
    packing: Packing | None,
    **options: Any,  # noqa: ANN401 - of bwd
) -> Gradients:
    """Return dq, dk, dv of a call of `fwd` for what autograd has of out and lse; see `bwd`."""
    return derivatives.differentiate(
        partial(bwd, packing=packing, **options),
        (q, k, v, out, lse),
        dout,
        dlse,
        max_seqlen_k=None if packing is None else packing.max_seqlen_k,
    )


def is_exporting() -> bool:
    """Whether torch.export traces this; before 2.13 `is_exporting` says so of torch.compile, too.

    That is https://github.com/pytorch/pytorch/issues/176347.
    """
    return bool(getattr(torch.compiler, "_is_exporting_flag", False))


def band_or_handle(mask: Band | BlockMask) -> Band | int:
    """Return what the operators know a mask by: a handle is of this process alone."""
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
    return mask.handle


def find_resident(handle: int, q: Tensor, k: Tensor) -> registry.Resident | None:
    """Return a mask's tensors on the GPU of q; None where there is no query or no key."""
    index, sizes_q, seqlen_k = q.get_device(), q.shape, k.shape[1]
    found = registry.recall(handle, index, sizes_q, seqlen_k)
    if found is None:
        shape = shape_of(q, k)
        if cpu.is_empty(handle, shape):
            return None
        found = registry.resident(handle, q.device, shape)
        registry.remember(handle, index, sizes_q, seqlen_k, found)
    return found


def masked_fwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    handle: int,
    softmax_scale: float,
    keep: bool,  # noqa: FBT001
    ieee: bool = False,  # noqa: FBT001, FBT002
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    """Return out and lse for a BlockMask on a GPU, where there are scores by scoring/scored.py."""
    if keep:
        registry.keep(handle)
    found = find_resident(handle, q, k)
    mask = (None, Band().ints) if found is None else (found.data, found.plan.layout)
    operator = _operators.scored_fwd if scores else _operators.fwd
    out, lse = operator(q, k, v, *mask, *NOT_PACKED, softmax_scale, ieee, *scores)
    return out, lse


def masked_bwd(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    handle: int,
    softmax_scale: float,
    budget: int,
    batch_invariant: bool,  # noqa: FBT001
    ieee: bool = False,  # noqa: FBT001, FBT002
    *scores: Any,  # noqa: ANN401
) -> tuple[Tensor, ...]:
    """Return dq, dk, dv for a BlockMask on a GPU; likewise, then dsinks as well."""
    found = find_resident(handle, q, k)
    saved = dout, q, k, v, out, lse, dlse
    mask: tuple[Tensor | None, Tensor | None, list[int]] = None, None, Band().ints
    if found is not None:
        mask = found.data, found.plan.key_slots, found.plan.layout
    plan = softmax_scale, budget, batch_invariant, ieee
    operator = _operators.scored_bwd if scores else _operators.bwd
    return tuple(operator(*saved, *mask, *NOT_PACKED, *plan, *scores))


torch.library.impl("flash_dist::masked_fwd", "CUDA", masked_fwd)
torch.library.impl("flash_dist::masked_bwd", "CUDA", masked_bwd)


def outputs_like(q: Tensor, v: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Return out and lse, of no values yet."""
    tokens = 1 if packed else 2  # axes before the heads
    *batch, seqlen_q = q.shape[:tokens]
    heads = math.prod(q.shape[tokens:-1])
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty((*batch, heads, seqlen_q), dtype=lse_dtype)


# --- Shapes, for torch.compile; scoring/scored.py has the same of its own -------------------------


def fwd_fake(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _mask_data: Tensor | None,
    _mask: list[int],
    cu_seqlens_q: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    """Return what `fwd` would, of no values; warn where what packs documents cannot be checked."""
    packed = cu_seqlens_q is not None
    if packed and q.device.type == "cuda" and is_checking():
        warn_unchecked("a compiled graph")
    return outputs_like(q, v, packed=packed)


def masked_fwd_fake(q: Tensor, _k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """Return what `masked_fwd` would, of no values."""
    return outputs_like(q, v, packed=False)


def bwd_fake(_dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> Gradients:
    """Return what any backward would, of no values."""
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _fwd_alone_fake(
    q: Tensor,
    _k: Tensor,
    v: Tensor,
    _mask: Tensor,
    _mask_data: Tensor | None,
    _softmax_scale: float,
    _ieee: bool = False,  # noqa: FBT001, FBT002
    cu_seqlens_q: Tensor | None = None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    return outputs_like(q, v, packed=cu_seqlens_q is not None)


for _name, _fake in (
    ("fwd", fwd_fake),
    ("fwd_alone", _fwd_alone_fake),
    ("masked_fwd", masked_fwd_fake),
    ("bwd", bwd_fake),
    ("bwd_alone", bwd_fake),
    ("masked_bwd", bwd_fake),
):
    torch.library.register_fake(f"flash_dist::{_name}", _fake)
