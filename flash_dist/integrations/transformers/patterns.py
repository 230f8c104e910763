"""Read a mask function of transformers instead of evaluating it for every pair.

transformers builds a mask of small functions of (batch, head, query, key) and combines them with
`and_masks`. They are known by their names and the variables that they close over, as they have been
since 4.57. What is not known here is evaluated, by transformers' own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...masks.band import Band

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

EVERYTHING: Final = Band()

_MODULE: Final = "transformers.masking_utils"


@dataclass(frozen=True)
class Pattern:
    """A band in absolute positions, within documents."""

    band: Band = EVERYTHING
    documents: Tensor | None = None  # [batch, seqlen], integers: equal within a document

    def join(self, other: Pattern) -> Pattern | None:
        """Return what both show, None where both have documents."""
        if self.documents is not None and other.documents is not None:
            return None
        band = self.band.intersect(other.band)
        documents = other.documents if self.documents is None else self.documents
        return Pattern(band, documents)


def read_pattern(function: Callable[..., Any]) -> Pattern | None:
    """Return what a mask function shows, None if that cannot be told by its looks."""
    if getattr(function, "__module__", None) != _MODULE:
        return None
    reader = _READERS.get(function.__qualname__)
    return None if reader is None else reader(_variables(function))


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return what a function closes over, by name."""
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _read_all(variables: dict[str, Any]) -> Pattern | None:
    joint: Pattern | None = Pattern()
    for function in variables["mask_functions"]:
        part = read_pattern(function)
        joint = None if joint is None or part is None else joint.join(part)
    return joint


def _read_causal(_: dict[str, Any]) -> Pattern:
    return Pattern(Band(right=0))


def _read_full(_: dict[str, Any]) -> Pattern:
    return Pattern()


def _read_window(variables: dict[str, Any]) -> Pattern:
    """A window of W keys counts that of the query itself."""
    return Pattern(Band(left=variables["sliding_window"] - 1))


def _read_symmetric_window(variables: dict[str, Any]) -> Pattern:
    """A window to both sides does not."""
    return Pattern(Band(variables["sliding_window"], variables["sliding_window"]))


def _read_documents(variables: dict[str, Any]) -> Pattern:
    return Pattern(documents=variables["packed_sequence_mask"])


def _read_remapped(variables: dict[str, Any]) -> Pattern | None:
    """Positions that begin anew in every document: a band is the same in them."""
    pattern = read_pattern(variables["mask_function"])
    return pattern if pattern is not None and pattern.documents is None else None


_READERS: Final[dict[str, Callable[[dict[str, Any]], Pattern | None]]] = {
    "and_masks.<locals>.and_mask": _read_all,
    "bidirectional_mask_function": _read_full,
    "causal_mask_function": _read_causal,
    "packed_sequence_mask_function.<locals>.inner_mask": _read_documents,
    "remap_positions_for_packed_sequence.<locals>.inner_mask": _read_remapped,
    "sliding_window_bidirectional_overlay.<locals>.inner_mask": _read_symmetric_window,
    "sliding_window_overlay.<locals>.inner_mask": _read_window,
}
