"""The problems, baselines, passes and states of L2 that a measurement covers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .baselines.names import COPY, DETERMINISTIC, PACKAGES, PASSES, PLAIN, STATES

if TYPE_CHECKING:
    from .baselines.shapes import Shape

_FLASH: Final = ("sdpa-flash", "sdpa-flash-deterministic")
_NEWER: Final = tuple(y for x in PACKAGES for y in (x, x + DETERMINISTIC))  # used if installed
_PASSES: Final = ("forward", "backward")
_WARM: Final = ("warm",)
_EVERY_BACKEND: Final = (
    *_FLASH,
    "sdpa-cudnn",
    "sdpa-efficient",
    "sdpa-efficient-deterministic",
)

# Default peers, passes and states of L2 of each set. The command line may override them.
DEFAULTS: Final = {
    "paper": ((*_FLASH, "sdpa-cudnn", *_NEWER), _PASSES, _WARM),
    "long": (("sdpa-cudnn", "sdpa-flash", *_NEWER), _PASSES, _WARM),
    "corners": (
        ("sdpa-cudnn", "sdpa-flash", "sdpa-efficient", *_NEWER, "flex", COPY),
        _PASSES,
        _WARM,
    ),
    "seed": ((*_EVERY_BACKEND, "flex", "eager"), PASSES, STATES),
    "varlen": (("sdpa-flash", "flex", *_NEWER), PASSES, _WARM),
    "fp32": (("eager", "sdpa-efficient"), PASSES, _WARM),
    "scores": (("flex", *_NEWER), _PASSES, _WARM),
    "features": ((PLAIN, "sdpa-flash"), _PASSES, _WARM),
    "decode": (("sdpa-cudnn", "sdpa-flash", COPY), ("forward",), ("cold",)),
    "mine": ((*_FLASH, "sdpa-cudnn", *_NEWER, "flex"), PASSES, _WARM),
}


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement. Each baseline runs each pass in three loops of `seconds` seconds."""

    shapes: tuple[Shape, ...]
    peers: tuple[str, ...]
    passes: tuple[str, ...]
    states: tuple[str, ...]
    seconds: float
    for_masks: tuple[str, ...] = ()  # peers skipped on full and causal shapes that are not packed

    def peers_of(self, shape: Shape) -> tuple[str, ...]:
        """Return the peers that are measured on a shape."""
        plain = shape.mask.kind in {"full", "causal"} and not shape.documents
        return tuple(x for x in self.peers if not (plain and x in self.for_masks))

    def passes_of(self, shape: Shape) -> tuple[str, ...]:
        """Return the passes measured on a shape.

        A stack of layers has only `checkpointed`, and a KV cache only `forward`.
        """
        if shape.cached:
            return tuple(x for x in self.passes if x == "forward")
        return tuple(x for x in self.passes if shape.layers == 1 or x == "checkpointed")
