"""Operators for graphs of torch.compile: they read masks when a graph runs, and attend by them."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.nn.functional import pad

from ...attention.arguments import choose_scale, prepare_inputs
from ...attention.support import require_kernels
from ...kernels import operators
from ...kernels.budget import BUDGET_NOW
from ...kernels.derivatives import refuse_second
from ...kernels.operators import Packing
from ...kernels.precision import is_ieee
from ...masks import Band
from .host import read_padding, see, see_once
from .refusals import refuse_tracing
from .sight import Segments, Sight, find_documents
from .traced import NAMESPACE

Tensor = torch.Tensor
Pair = tuple[Tensor, Tensor]

_library: Final = torch.library.Library(NAMESPACE, "FRAGMENT")
_SCHEMAS: Final = """
see(Tensor? tokens, Tensor? probes, int[] steps, Tensor? positions, Tensor? moved, SymInt offset,
    SymInt batch, SymInt queries, SymInt keys, int left, int right) -> (Tensor, Tensor);
split(Tensor numbers, Tensor bounds, Tensor positions, SymInt batch) -> (Tensor, Tensor);
see_once(Tensor? tokens, Tensor? moved, SymInt offset, SymInt batch, SymInt keys, int left,
    int right, Device device) -> Tensor;
attend(Tensor q, Tensor k, Tensor v, Tensor numbers, Tensor bounds, float scale, bool ieee)
    -> (Tensor, Tensor);
attend_backward(Tensor? dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse,
    Tensor numbers, Tensor bounds, float scale, bool ieee) -> (Tensor, Tensor, Tensor)
"""
for _schema in _SCHEMAS.split(";"):
    _library.define(" ".join(_schema.split()), tags=(torch.Tag.cudagraph_unsafe,))
_operators: Final[Any] = getattr(torch.ops, NAMESPACE)


def attend_traced(q: Tensor, k: Tensor, v: Tensor, graph: Pair, scale: float | None) -> Pair:
    """Return out and lse; the arguments are those of flash_attn_func."""
    q, k, v = prepare_inputs(q, k, v)
    ieee = is_ieee(None) and q.dtype == torch.float32
    pair: Pair = _operators.attend(q, k, v, *graph, choose_scale(scale, q.shape[-1]), ieee)
    return pair


def _see(  # noqa: PLR0913, PLR0917 - the operator's schema
    tokens: Tensor | None,
    probes: Tensor | None,
    steps: list[int],
    positions: Tensor | None,
    moved: Tensor | None,
    offset: int,
    batch: int,
    queries: int,
    keys: int,
    left: int,
    right: int,
) -> Pair:
    band = Band(left, right)
    segments = None
    if positions is not None:
        segments = find_documents(positions.to("cpu").expand(batch, -1))
    elif probes is not None:
        segments = _find_segments(probes.to("cpu"), steps, band)
    padding = read_padding(tokens, keys)
    if segments is None:
        offset = offset if moved is None else int(moved)
        sight = see(band, padding, offset, queries, keys)
    else:
        sight = Sight(band, segments)
    gaps = padding is not None and (segments is not None or padding.gaps)
    if sight.mask is not None or gaps:
        refuse_tracing()
    used = keys if sight.keys is None else sight.keys
    numbers = left, right, used
    device = next((x.device for x in (tokens, probes, positions, moved) if x is not None), "cpu")
    return _pack(numbers, sight.segments, batch * queries, torch.device(device))


def _pack(
    numbers: tuple[int, ...], segments: Segments | None, total: int, device: torch.device
) -> Pair:
    """Return the tensors of a mask: left, right, keys, bounds and the longest; bounds with room."""
    bounds = torch.zeros(total + 1, dtype=torch.int32, device=device)
    count, longest = 0, 0
    if segments is not None:
        found = segments.on(device)
        count, longest = len(found), segments.longest
        bounds[:count] = found
    return torch.tensor([*numbers, count, longest], device="cpu"), bounds


def _split(numbers: Tensor, bounds: Tensor, positions: Tensor, batch: int) -> Pair:
    """Return a mask within the documents of position_ids [batch or 1, seqlen]."""
    *known, count, _ = numbers.tolist()
    found = find_documents(positions.to("cpu").expand(batch, -1))
    if found is None:
        return numbers.clone(), bounds.clone()
    starts = found.starts
    starts.view(-1)[bounds[: max(count - 1, 0)].to("cpu", torch.int64)] = True
    return _pack((*known,), Segments(starts), starts.numel(), bounds.device)


def _find_segments(probes: Tensor, steps: list[int], band: Band) -> Segments | None:
    """Return where sequences begin, None if rows are one each; and hold the mask against that."""
    starts = ~probes[0]
    starts[:, 0] = True
    ids = starts.cumsum(1)
    seqlen = ids.shape[1]
    numbers = torch.arange(seqlen, device="cpu")
    for step, seen in zip(steps[1:], probes[1:], strict=True):
        key = numbers + step
        exists = (key >= 0) & (key < seqlen)
        in_band = (band.left < 0 or step >= -band.left) and (band.right < 0 or step <= band.right)
        right = (ids == ids[:, key.clamp(0, seqlen - 1)]) & in_band
        if bool((exists & (seen != right)).any()):
            refuse_tracing()
    return Segments(starts) if bool(starts[:, 1:].any()) else None


def _see_once(  # noqa: PLR0913, PLR0917 - the operator's schema
    tokens: Tensor | None,
    moved: Tensor | None,
    offset: int,
    batch: int,
    keys: int,
    left: int,
    right: int,
    device: torch.device,
) -> Tensor:
    padding = read_padding(tokens, keys)
    if padding is not None and padding.gaps:
        refuse_tracing()
    seen = see_once(Band(left, right), padding, offset if moved is None else moved, keys, device)
    if seen is None:
        seen = torch.tensor([0, keys], dtype=torch.int32, device=device)
    return seen.view(-1, 1, 1, 2).expand(batch, 1, 1, 2).contiguous()


def _unpack(numbers: Tensor, bounds: Tensor) -> tuple[Band, int, Packing | None]:
    """Return the band, the keys that exist and what is packed."""
    left, right, keys, count, longest = numbers.tolist()
    packing = Packing(bounds[:count], bounds[:count], longest, longest) if count else None
    return Band(left, right), keys, packing


def _attend(  # noqa: PLR0913, PLR0917 - the operator's schema
    q: Tensor,
    k: Tensor,
    v: Tensor,
    numbers: Tensor,
    bounds: Tensor,
    scale: float,
    ieee: bool,  # noqa: FBT001
) -> Pair:
    if q.device.type == "cuda":
        require_kernels(q.device.index, q.dtype, q.shape[-1], v.shape[-1], ieee=ieee)
    band, keys, packing = _unpack(numbers, bounds)
    k, v = k[:, :keys], v[:, :keys]
    if packing is None:
        return operators.fwd(q, k, v, mask=band, packing=None, softmax_scale=scale, ieee=ieee)
    flat = (x.flatten(0, 1) for x in (q, k, v))
    out, lse = operators.fwd(*flat, mask=band, packing=packing, softmax_scale=scale, ieee=ieee)
    lse = lse.unflatten(1, q.shape[:2]).transpose(0, 1)
    return out.unflatten(0, q.shape[:2]), lse.contiguous()


def _attend_backward(  # noqa: PLR0913, PLR0917 - the operator's schema
    dout: Tensor | None,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    numbers: Tensor,
    bounds: Tensor,
    scale: float,
    ieee: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    band, keys, packing = _unpack(numbers, bounds)
    unused = k.shape[1] - keys
    k, v = k[:, :keys], v[:, :keys]
    shapes = q.shape, k.shape, v.shape
    if packing is not None:
        q, k, v, out = (x.flatten(0, 1) for x in (q, k, v, out))
        dout = None if dout is None else dout.flatten(0, 1)
        lse = lse.transpose(0, 1).flatten(1)
        dlse = None if dlse is None else dlse.transpose(0, 1).flatten(1)
    gradients = operators.differentiate(
        dout,
        q,
        k,
        v,
        out,
        lse,
        dlse,
        packing=packing,
        mask=band,
        softmax_scale=scale,
        budget=BUDGET_NOW,
        batch_invariant=False,
        ieee=ieee,
    )
    dq, dk, dv = (x.view(shape) for x, shape in zip(gradients, shapes, strict=True))
    if unused:
        dk, dv = (pad(x, (0, 0, 0, 0, 0, unused)) for x in (dk, dv))
    return dq, dk, dv


for _name, _kernel in (
    ("see", _see),
    ("split", _split),
    ("see_once", _see_once),
    ("attend", _attend),
    ("attend_backward", _attend_backward),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")


# --- Shapes, for torch.compile --------------------------------------------------------------------


@torch.library.register_fake(f"{NAMESPACE}::see", lib=_library)
def _see_fake(  # noqa: PLR0913, PLR0917 - the operator's schema
    tokens: Tensor | None,
    probes: Tensor | None,
    steps: list[int],  # noqa: ARG001
    positions: Tensor | None,
    moved: Tensor | None,
    offset: int,  # noqa: ARG001
    batch: int,
    queries: int,
    keys: int,  # noqa: ARG001
    left: int,  # noqa: ARG001
    right: int,  # noqa: ARG001
) -> Pair:
    device = next((x.device for x in (tokens, probes, positions, moved) if x is not None), "cpu")
    numbers = torch.empty(5, dtype=torch.int64, device="cpu")
    return numbers, torch.empty(batch * queries + 1, dtype=torch.int32, device=device)


@torch.library.register_fake(f"{NAMESPACE}::split", lib=_library)
def _split_fake(numbers: Tensor, bounds: Tensor, positions: Tensor, batch: int) -> Pair:  # noqa: ARG001
    return torch.empty_like(numbers), torch.empty_like(bounds)


@torch.library.register_fake(f"{NAMESPACE}::see_once", lib=_library)
def _see_once_fake(  # noqa: PLR0913, PLR0917 - the operator's schema
    tokens: Tensor | None,  # noqa: ARG001
    moved: Tensor | None,  # noqa: ARG001
    offset: int,  # noqa: ARG001
    batch: int,
    keys: int,  # noqa: ARG001
    left: int,  # noqa: ARG001
    right: int,  # noqa: ARG001
    device: torch.device,
) -> Tensor:
    return torch.empty(batch, 1, 1, 2, dtype=torch.int32, device=device)


@torch.library.register_fake(f"{NAMESPACE}::attend", lib=_library)
def _attend_fake(
    q: Tensor,
    k: Tensor,  # noqa: ARG001
    v: Tensor,
    *_: object,
) -> Pair:
    batch, seqlen, heads = q.shape[:3]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty((batch, seqlen, heads, v.shape[-1]))
    return out, q.new_empty((batch, heads, seqlen), dtype=dtype)


@torch.library.register_fake(f"{NAMESPACE}::attend_backward", lib=_library)
def _attend_backward_fake(
    dout: Tensor | None,  # noqa: ARG001
    dlse: Tensor | None,  # noqa: ARG001
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:  # noqa: ANN401
    *tensors, ctx.scale, ctx.ieee = inputs
    q, k, v, numbers, bounds = tensors
    ctx.save_for_backward(q, k, v, *output, numbers, bounds)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any,  # noqa: ANN401
    dout: Tensor | None,
    dlse: Tensor | None,
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 7
    gradients = torch.ops.flash_dist_transformers.attend_backward(
        dout, dlse, *ctx.saved_tensors, ctx.scale, ctx.ieee
    )
    return *gradients, *(None,) * 4


torch.library.register_autograd(
    f"{NAMESPACE}::attend", _differentiate, setup_context=_save, lib=_library
)
torch.library.register_autograd(f"{NAMESPACE}::attend_backward", refuse_second, lib=_library)
