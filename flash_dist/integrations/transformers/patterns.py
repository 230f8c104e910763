"""Recognises mask functions of transformers, to avoid evaluating every (query, key) pair.

transformers builds a mask from small functions of (batch, head, query, key) and combines them with
`and_masks`. We recognise these functions by their names and read the variables in their closures,
which have not changed since transformers 4.57. transformers' own code evaluates other functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ...masks.band import Band

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

EVERYTHING: Final = Band()

_MODULE: Final = "transformers.masking_utils"


@dataclass(frozen=True)
class Pattern:
    """A band in absolute positions, within documents."""

    band: Band = EVERYTHING
    documents: Tensor | None = None  # [batch, seqlen], id of each token's document; None: no limit

    def join(self, other: Pattern) -> Pattern | None:
        """Return the intersection of both; None if both have documents."""
        if self.documents is not None and other.documents is not None:
            return None
        band = self.band.intersect(other.band)
        documents = other.documents if self.documents is None else self.documents
        return Pattern(band, documents)


def read_pattern(function: Callable[..., Any]) -> Pattern | None:
    """Return the pattern of a mask function; None if it is not recognised."""
    if getattr(function, "__module__", None) != _MODULE:
        return None
    variables = _variables(function)
    found: Pattern | None = None
    match function.__qualname__:
        case "and_masks.<locals>.and_mask":
            found = _join_all(variables["mask_functions"])
        case "bidirectional_mask_function":
            found = Pattern()
        case "causal_mask_function":
            found = Pattern(Band(right=0))
        case "packed_sequence_mask_function.<locals>.inner_mask":
            found = Pattern(documents=variables["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence.<locals>.inner_mask":
            inner = read_pattern(variables["mask_function"])
            # remapped positions restart in each document, which does not change a band
            found = inner if inner is not None and inner.documents is None else None
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            found = Pattern(Band(variables["sliding_window"], variables["sliding_window"]))
        case "sliding_window_overlay.<locals>.inner_mask":  # the window counts the query itself
            found = Pattern(Band(left=variables["sliding_window"] - 1))
    return found


def _variables(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the variables in a function's closure, by name."""
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _join_all(functions: Iterable[Callable[..., Any]]) -> Pattern | None:
    joint: Pattern | None = Pattern()
    for function in functions:
        part = read_pattern(function)
        joint = None if joint is None or part is None else joint.join(part)
    return joint
