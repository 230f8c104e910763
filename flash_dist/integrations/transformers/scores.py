"""Score modifications of a layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch


class Scores(NamedTuple):
    """Score modifications in the terms of transformers."""

    scale: float | None  # None: head_dim ** -0.5
    softcap: float | None = None  # None or 0: none
    sinks: torch.Tensor | None = None  # [num_heads_q]

    def find_options(self) -> dict[str, Any]:
        """Return the same as arguments of the attention functions."""
        chosen: dict[str, Any] = {"softmax_scale": self.scale}
        if self.softcap:
            chosen["softcap"] = self.softcap
        if self.sinks is not None:
            chosen["learnable_sink"] = self.sinks
        return chosen
