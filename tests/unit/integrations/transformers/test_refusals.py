"""Requests without a kernel are refused with the module's name, and with the setting to change."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_dist.integrations.transformers.refusals import (
    refuse_dropout,
    refuse_packed_bias,
    refuse_sizes,
    refuse_tracing,
    require_supported,
)

NO_WISH: dict[str, Any] = {"cache": None}


class Attention(torch.nn.Module):
    def __init__(self, **config: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)


def test_none_and_false_are_supported_and_other_arguments_are_not_looked_at() -> None:
    require_supported(Attention(), {"use_cache": True, "head_mask": None, "indices": None})
    require_supported(Attention(), {**NO_WISH, "output_attentions": False})


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ({"head_mask": torch.zeros(1)}, r"Attention asks for head_mask, .*weigh heads"),
        ({"indices": torch.zeros(1)}, r"asks for indices, .*selected keys\n\nhint: .*eager"),
        ({"block_indices": torch.zeros(1)}, r"asks for block_indices, .*selected keys"),
        ({"sinks": torch.zeros(1)}, r"asks for sinks, and there are no sinks of single queries"),
        ({"output_attentions": True}, r"asks for output_attentions=True, .*stored"),
        (
            {"cache": object()},
            r"asks for a paged cache, .*no pages.*\n\nhint: .*serves continuous batching",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wish_is_refused_by_name(argument: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"(?s){words}"):
        require_supported(Attention(), {**NO_WISH, **argument})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"attention_probs_dropout_prob": 0.1}, "attention_probs_dropout_prob"),
        ({"dropout": 0.1, "attention_dropout": 0.0}, "dropout"),
        ({"dropout": 0.1, "attention_dropout": 0.1}, "attention_dropout"),
        ({}, "attention_dropout"),
    ],
)
def test_dropout_of_a_cache_is_refused_with_what_its_configuration_calls_it(
    config: dict[str, float], name: str
) -> None:
    refuse_dropout(Attention(**config), 0.0)
    words = rf"asks for dropout=0.1 in `generate`, .*\n\nhint: .*`{name}=0.0`"
    with pytest.raises(ValueError, match=words):
        refuse_dropout(Attention(**config), 0.1)


def test_a_bias_of_packed_sequences_and_a_mask_that_no_graph_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="must be None with cu_seq_lens_q"):
        refuse_packed_bias()
    with pytest.raises(ValueError, match=r"torch\.compile"):
        refuse_tracing()


def test_a_mask_made_for_other_numbers_of_queries_and_keys_is_refused() -> None:
    words = r"Attention gives 12 queries and 13 keys, .* made for 12 and 12\n\nhint: .*eager"
    with pytest.raises(ValueError, match=words):
        refuse_sizes(Attention(), (12, 12), (12, 13))
