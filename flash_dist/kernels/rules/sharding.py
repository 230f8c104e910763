"""The operators on DTensors: each rank computes its own batch entries or heads.

The rule is registered with `register_torch_dispatch` instead of DTensor's `register_sharding`. It
thus handles all mesh dimensions at once, as grouped heads (GQA) require, and avoids a cache in
torch that mistakes one optional tensor for another. Any mesh dimensions may shard `batch` or
`heads`; along other mesh dimensions all ranks compute the same results. No rank needs the results
of another rank, so nothing is sent unless an input must be redistributed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import torch

from ...masks import registry
from ...masks.inputs import complain
from .late import when_imported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Tensor = torch.Tensor

_OPERATORS: Final = (
    "attention",
    "attention_backward",
    "attention_no_grad",
    "attention_backward_no_grad",
    "attention_masked",
    "attention_masked_backward",
)
_OF_ONE_RANK: Final = (
    "attention_max_logit",
    "attention_masked_max_logit",
    "decode",
    "decode_no_lse",
    "append",
)
_LOCAL: Final = ("mask",)  # a tensor of integers that is the same on all ranks
_TOKENS: Final = frozenset(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
_ROWS: Final = frozenset(("lse", "dlse", "dsinks"))
# Arguments that must be DTensors. Other arguments may be plain tensors that are the same on all
# ranks, such as the zero gradients that torch.compile makes. Sinks as a plain tensor could not get
# a gradient.
_SHARDED: Final = frozenset(("q", "k", "v", "out", "lse", "sinks"))
_BATCH: Final = "batch"
_HEADS: Final = "heads"
_PLURAL: Final = {_BATCH: "batch entries", _HEADS: "heads"}


class Axes(NamedTuple):
    """The dimensions of a tensor that may be sharded; None: the tensor has no such dimension."""

    batch: int | None
    heads: int | None

    @classmethod
    def of(cls, name: str, dims: int, *, packed: bool) -> Axes:
        """Return the axes of an argument or a result of the operators."""
        if name in _TOKENS:
            return cls(None, 1) if packed else cls(0, 2)
        if name in _ROWS:
            return cls(None, 0) if packed else cls(0, 1)
        if name == "sinks" or (name == "alibi_slopes" and dims == 1):
            return cls(None, 0)
        if name == "alibi_slopes":
            return cls(0, 1)
        return cls(None, None)


class Sharding(NamedTuple):
    """How one call is distributed over a mesh."""

    mesh: DeviceMesh
    kinds: tuple[str | None, ...]  # per mesh dimension: batch, heads or None
    packed: bool

    @classmethod
    def of(cls, given: dict[str, Any]) -> Sharding:
        """Return one sharding for q, k and v; a replicated tensor gets the sharding of the others.

        Raises:
            TypeError: One of the three is not a DTensor.
            ValueError: A tensor is on another mesh or is sharded along an unsupported dimension,
                the tensors are sharded differently, or the heads of k and v cannot be divided.
        """
        q, k = given["q"], given["k"]
        packed = given.get("cu_seqlens_q") is not None
        for name in ("q", "k", "v"):
            _require_dtensor(name, given[name], q)
        mesh = q.device_mesh
        kinds = []
        for i in range(mesh.ndim):
            found = {name: _kind(name, given[name], i, packed=packed) for name in ("q", "k", "v")}
            some = set(found.values()) - {None}
            if len(some) > 1:
                raise complain(
                    ValueError,
                    f"q, k and v must be sharded alike, got {found} by dimension {i} of the mesh",
                    "`redistribute` one of them first",
                )
            kinds.append(next(iter(some), None))
        sharding = cls(mesh, tuple(kinds), packed)
        heads, ranks = k.shape[1 if packed else 2], sharding.count(_HEADS)
        if heads % ranks:
            raise complain(
                ValueError,
                f"num_heads_kv must be a multiple of {ranks}, the ranks that heads are sharded "
                f"over, got {heads}",
                "`redistribute` q, k and v to Replicate() or to shards of the batch, or repeat "
                "the heads of k and v",
            )
        return sharding

    def count(self, kind: str) -> int:
        """Return the number of ranks over which the batch or the heads are sharded."""
        ranks = 1
        for i, one in enumerate(self.kinds):
            ranks *= self.mesh.size(i) if one == kind else 1
        return ranks

    def find_part(self, kind: str, size: int) -> slice:
        """Return this rank's entries or heads, as Shard distributes them; all if size is 1."""
        begin, end = 0, size
        for i, one in enumerate(self.kinds):
            if one == kind and size != 1:
                chunk = -(-(end - begin) // self.mesh.size(i))
                begin = min(begin + chunk * self.mesh.get_local_rank(i), end)
                end = min(begin + chunk, end)
        return slice(begin, end)

    def placements(self, axes: Axes) -> list[Any]:
        """Return the placements of a tensor whose batch and heads are at these axes."""
        from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - slow to import

        dims = {_BATCH: axes.batch, _HEADS: axes.heads, None: None}
        chosen = [dims[kind] for kind in self.kinds]
        return [Replicate() if dim is None else Shard(dim) for dim in chosen]

    def localize(self, name: str, value: Any, q: DTensor) -> object:  # noqa: ANN401 - any argument
        """Return this rank's part of a tensor; return `mask` and non-tensors unchanged."""
        if not isinstance(value, torch.Tensor) or name in _LOCAL:
            return value
        from torch.distributed.tensor import DTensor, Replicate  # noqa: PLC0415

        if type(value) is not type(q) and name not in _SHARDED:
            everywhere = [Replicate()] * self.mesh.ndim
            value = DTensor.from_local(value, self.mesh, everywhere, run_check=False)
        _require_dtensor(name, value, q)
        axes = Axes.of(name, value.dim(), packed=self.packed)
        places = self.placements(axes)
        if list(value.placements) != places:
            value = value.detach().redistribute(self.mesh, places)  # torch 2.10 needs detach()
        return value.to_local()

    def join(self, name: str, local: Tensor, batch: int) -> DTensor:
        """Return a result as a DTensor, from this rank's part and the size of the whole batch."""
        from torch.distributed.tensor import DTensor  # noqa: PLC0415

        axes = Axes.of(name, local.dim(), packed=self.packed)
        if name == "dsinks" and local.dim() == 1:  # without sinks, dsinks is an empty tensor
            axes = Axes(None, None)
        shape = list(local.shape)
        if axes.batch is not None:
            shape[axes.batch] = batch
        if axes.heads is not None:
            shape[axes.heads] *= self.count(_HEADS)
        whole = torch.Size(shape)
        stride = torch.empty(whole, device="meta").stride()
        places = self.placements(axes)
        return DTensor.from_local(
            local, self.mesh, places, run_check=False, shape=whole, stride=stride
        )


def _require_dtensor(name: str, x: object, q: object) -> None:
    """Raise unless q and another tensor are DTensors on the same mesh."""
    meshes = [getattr(one, "device_mesh", None) for one in (q, x)]
    if None in meshes:
        kinds = f"{type(q).__name__} and {type(x).__name__}"
        raise complain(
            TypeError,
            f"q and {name} must both be DTensors, got {kinds}",
            "`distribute_tensor` and `DTensor.from_local` of torch.distributed.tensor make one",
        )
    if meshes[0] != meshes[1]:
        message = f"q and {name} must be on the same mesh, got {meshes[0]} and {meshes[1]}"
        raise complain(ValueError, message)


def _kind(name: str, x: DTensor, i: int, *, packed: bool) -> str | None:
    """Return the axis of a tensor that mesh dimension i shards: batch, heads or None."""
    from torch.distributed.tensor import Partial, Replicate, Shard  # noqa: PLC0415

    placement = x.placements[i]
    if isinstance(placement, (Replicate, Partial)):
        return None
    axes = Axes.of(name, x.dim(), packed=packed)
    if type(placement) is Shard:
        dim = placement.dim % x.dim()
        if dim == axes.batch:
            return _BATCH
        if dim == axes.heads:
            return _HEADS
        if dim == (0 if packed else 1):
            _refuse_tokens(name, x, placement)
    served = f"Shard({axes.heads}) (heads)"
    if axes.batch is not None:
        served = f"Shard({axes.batch}) (batch), {served}"
    raise complain(
        ValueError,
        f"{name} must be {served} or Replicate() on each dimension of the mesh, got {placement} "
        f"(shape {list(x.shape)})",
        f"`{name}.redistribute(placements=...)` moves it",
    )


def _refuse_tokens(name: str, x: DTensor, placement: object) -> NoReturn:
    """Raise for tensors whose tokens are sharded over ranks."""
    raise complain(
        ValueError,
        f"{name} must not be sharded along its tokens, got {placement} (shape {list(x.shape)})",
        "`ring_attention` computes one sequence on several ranks, of local tensors; "
        f"`{name}.redistribute(placements=...)` gives each rank whole sequences",
    )


def _require_plain(given: dict[str, Any]) -> None:
    """Raise for dropout, and for a bias: no placement describes the broadcast axes of a bias."""
    problem = ""
    if given.get("bias") is not None:
        problem = "bias must be None for DTensors, got a tensor"
    elif given.get("dropout_p"):
        problem = f"dropout_p must be 0 for DTensors, got {given['dropout_p']}"
    if problem:
        hint = (
            "`torch.distributed.tensor.experimental.local_map` runs a function of this rank's part"
        )
        raise complain(TypeError, problem, hint)


def _localize_mask(given: dict[str, Any], sharding: Sharding) -> None:
    """Replace a BlockMask by this rank's part; raise for masks that cannot be divided."""
    if given.get("mask_data") is not None:
        raise complain(
            TypeError,
            "mask_data must be None for DTensors, got a tensor",
            "`flash_dist::attention_masked` takes a mask",
        )
    if "handle" not in given:
        return
    if given["plan"] is None:
        mask: Any = registry.find(int(given["handle"]))
        batches, heads = mask.sizes.planes()
        part = mask[sharding.find_part(_BATCH, batches), sharding.find_part(_HEADS, heads)]
        given["handle"] = part.handle
        return
    for kind, size in ((_BATCH, given["batches"]), (_HEADS, given["heads"])):
        if size != 1 and kind in sharding.kinds:
            raise complain(
                ValueError,
                f"an IntervalMask must be the same for all {_PLURAL[kind]} where these are "
                f"sharded, got one made for {size}",
                "a BlockMask is cut, or `torch.distributed.tensor.experimental.local_map` runs a "
                "function of this rank's part",
            )


def _run(
    _cls: type,
    operator: Any,  # noqa: ANN401 - torch's protocol
    _types: Sequence[type],
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
) -> tuple[DTensor, ...]:
    """Call an operator on this rank's part of all tensors. This runs below autograd."""
    schema = operator._schema  # noqa: SLF001 - no public equivalent
    named = zip((one.name for one in schema.arguments), args, strict=False)
    given = dict(named) | (kwargs or {})
    with torch.no_grad():  # DTensor's own operators would record gradients
        _require_plain(given)
        sharding = Sharding.of(given)
        _localize_mask(given, sharding)
        q = given["q"]
        local = {name: sharding.localize(name, value, q) for name, value in given.items()}
        results = operator(**local)
        return tuple(
            sharding.join(one.name, x, q.shape[0])
            for one, x in zip(schema.returns, results, strict=True)
        )


def _refuse(_cls: type, operator: Any, *_: object) -> NoReturn:  # noqa: ANN401 - torch's protocol
    """Raise for operators on a cache or with max_logit, which support no DTensor."""
    name = operator._schema.name  # noqa: SLF001
    raise complain(
        TypeError,
        f"`{name}` must have tensors of only this rank, got a DTensor",
        "`to_local()` is the part of this rank",
    )


def register() -> None:
    """Register the rules once torch's DTensor, which is slow to import, is imported."""
    when_imported("torch.distributed.tensor", _register)


def _register() -> None:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415

    for names, rule in ((_OPERATORS, _run), (_OF_ONE_RANK, _refuse)):
        for name in names:
            torch.library.register_torch_dispatch(f"flash_dist::{name}", DTensor, rule)
