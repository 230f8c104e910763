"""The mask of a forward pass, which the mask function makes once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

import torch
from torch.nn.functional import pad

from ...masks import BlockMask
from .patterns import EVERYTHING

if TYPE_CHECKING:
    from ...masks import IntervalMask
    from ...masks.band import Band

Tensor = torch.Tensor


class Segments:
    """Consecutive sequences in the tokens of a batch, [batch * seqlen]."""

    def __init__(self, starts: Tensor) -> None:
        """Begin a sequence where `starts` is True, and at the first token of each row.

        Args:
            starts: Booleans [batch, seqlen] on the host.
        """
        self.starts: Final = starts.clone()
        self.starts[:, 0] = True
        bounds = pad(self.starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel())
        self.shape: Final = starts.shape
        self.longest: Final = int(bounds.diff().max())
        self._bounds: Final = bounds.to(torch.int32)
        self._copies: Final[dict[torch.device, Tensor]] = {}
        self._masks: Final[dict[Band, BlockMask]] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return cu_seqlens on a device; the first call copies them there without waiting."""
        found = self._copies.get(device)
        if found is None:
            found = self._copies[device] = send(self._bounds, device)
        return found

    def see(self, band: Band) -> BlockMask:
        """Return a band within each sequence as a BlockMask, for tensors that are not packed."""
        found = self._masks.get(band)
        if found is None:
            inside = BlockMask.documents(self.starts.cumsum(1))
            within = BlockMask.sliding_window(band.left, band.right)
            found = self._masks[band] = inside & within
        return found


@dataclass(frozen=True, eq=False)
class LayerMask:
    """A mask for more than one query: a band within segments, a BlockMask, or intervals in a graph.

    transformers passes it on like a tensor, and only uses `ndim` and `contiguous`. Any other use as
    a tensor raises an error that names the use.
    """

    band: Band = EVERYTHING
    segments: Segments | None = None
    packed: bool = False  # segments are documents, not runs of tokens and of padding
    keys: int | None = None  # number of filled slots of a static cache; None: all keys are used
    mask: BlockMask | None = None  # replaces band and segments
    # Intervals that replace band and segments in a graph of torch.compile, see traced.py.
    graph: tuple[Tensor, Tensor] | None = None
    # Numbers of queries and keys that the mask was made for; None: not checked.
    sizes: tuple[int, int] | None = None
    # For calls in a graph: position_ids or None, and the mask that layers with these share.
    planned: list[tuple[Tensor | None, IntervalMask]] = field(default_factory=list)
    ndim: ClassVar[int] = 4  # marks a finished mask; not a field, as FSDP would replace it

    @property
    def is_band(self) -> bool:
        """True if the mask is only a band: segments, mask and graph are None."""
        return self.segments is None and self.mask is None and self.graph is None

    def contiguous(self) -> LayerMask:
        """Return self."""
        return self

    def __getattr__(self, name: str) -> NoReturn:
        message = _describe(f"reads `{name}` of")
        raise AttributeError(message, name=name, obj=self)

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(_describe("computes with"))

    __getitem__ = __add__ = __radd__ = __mul__ = __rmul__ = __and__ = __rand__ = _refuse
    __rsub__ = __lt__ = __gt__ = __invert__ = __len__ = __bool__ = _refuse


def _describe(use: str) -> str:
    return (
        f"a model that {use} its attention_mask is not supported: it is not a tensor here"
        '\n\nhint: `attn_implementation="eager"` serves it'
    )


def find_documents(positions: Tensor) -> Segments | None:
    """Return the documents of position_ids [batch, seqlen] on the host; None if no row restarts."""
    starts = find_restarts(positions)
    return Segments(starts) if bool(starts[:, 1:].any()) else None


def find_restarts(positions: Tensor) -> Tensor:
    """Return where position_ids [batch, seqlen] restart: at the row's minimum, or if they decrease.

    NOTE: skipped or repeated positions do not start a document in transformers' flash attention,
    nor in eager attention with a mask or a cache. Without a mask and a cache, transformers itself
    finds the documents, and includes them in the mask function.
    """
    lower = pad(positions.diff() < 0, (1, 0), value=True)
    if positions.shape[1] == 0:
        return lower[:, :0]
    return lower | (positions == positions.amin(1, keepdim=True))


def send(host: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host without waiting for the GPU."""
    pinned = host.pin_memory() if torch.device(device).type == "cuda" else host
    return pinned.to(device, non_blocking=True)
