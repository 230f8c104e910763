"""Mask functions are recognised by name; unknown ones are not guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dist.integrations.transformers.patterns import Pattern, read_pattern
from flash_dist.masks.band import Band
from tests.unit.made import mask_functions as made

IDS = torch.tensor([[0, 0, 1]])


@pytest.mark.parametrize(
    ("function", "band"),
    [
        pytest.param(made.causal_mask_function, Band(-1, 0), id="causal"),
        pytest.param(made.bidirectional_mask_function, Band(), id="full"),
        pytest.param(made.sliding_window_overlay(1), Band(0, -1), id="own-key"),
        pytest.param(made.sliding_window_bidirectional_overlay(4), Band(4, 4), id="both-sides"),
        pytest.param(
            made.and_masks(made.sliding_window_overlay(5), made.causal_mask_function),
            Band(4, 0),
            id="window",
        ),
        pytest.param(
            made.and_masks(
                made.and_masks(made.sliding_window_overlay(5), made.causal_mask_function),
                made.sliding_window_overlay(3),
            ),
            Band(2, 0),
            id="nested",
        ),
    ],
)
def test_a_band_is_read(function: Any, band: Band) -> None:  # noqa: ANN401
    assert read_pattern(function) == Pattern(band)


def test_documents_are_read_with_the_band_in_them() -> None:
    packed = made.packed_sequence_mask_function(IDS)
    remapped = made.remap_positions_for_packed_sequence(made.causal_mask_function, IDS)
    pattern = read_pattern(made.and_masks(packed, remapped))
    assert pattern is not None
    assert pattern.documents is IDS
    assert pattern.band == Band(-1, 0)


def own(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(own, id="own"),
        pytest.param(made.and_masks(made.causal_mask_function, own), id="and-own"),
        pytest.param(made.or_masks(made.causal_mask_function, own), id="or"),
        pytest.param(
            made.and_masks(*[made.packed_sequence_mask_function(IDS) for _ in range(2)]), id="twice"
        ),
        pytest.param(
            made.remap_positions_for_packed_sequence(made.packed_sequence_mask_function(IDS), IDS),
            id="remapped-documents",
        ),
        pytest.param(torch.nn.Identity(), id="no-function"),
    ],
)
def test_what_is_not_known_is_none(function: Any) -> None:  # noqa: ANN401
    assert read_pattern(function) is None
