"""Features of models without a kernel are refused, and so is a mask that no graph can hold."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import transformers

from flash_dist.integrations.transformers import register
from tests.integrations.transformers.models import (
    DEEPSEEK_V4,
    DEVICE,
    LED,
    OWN,
    REFUSED,
    VOCABULARY,
)

NAME = register()
IDS = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize(
    ("make", "inputs", "words"),
    [
        pytest.param(
            lambda: REFUSED["deepseek_v32"].make(NAME),
            {
                "attention_mask": torch.ones(12, 12, device=DEVICE)
                .tril()
                .bool()
                .expand(3, 1, 12, 12)
            },
            "DeepseekV32Attention asks for indices",
            id="deepseek_v32",
            marks=pytest.mark.skipif(
                not hasattr(transformers, REFUSED["deepseek_v32"].model), reason="a newer model"
            ),
        ),
    ],
)
def test_what_has_no_kernel_is_refused(make: Any, inputs: Any, words: str) -> None:  # noqa: ANN401
    with pytest.raises(ValueError, match=words):
        make()(input_ids=IDS, **inputs)


@pytest.mark.parametrize("name", OWN)
def test_a_model_with_attention_of_its_own_never_sees_later_keys(name: str) -> None:
    model = OWN[name].make(NAME)
    if not hasattr(sys.modules[type(model).__module__], "create_causal_mask"):
        pytest.skip("its masks are its own, too, in this version")
    words = r'(?s)its attention_mask is not supported.*hint: `attn_implementation="eager"`'
    with pytest.raises((AttributeError, TypeError), match=words):
        model(input_ids=IDS)


@pytest.mark.parametrize(
    "padding", [[[0, 1], [1, 1]], [[1, 0, 1, 1], [1, 1, 1, 1]]], ids=["side", "gap"]
)
def test_a_mask_of_one_query_is_never_added_to_scores(padding: list[list[int]]) -> None:
    """The model's own cross attention adds its masks: booleans, or one number for each key."""
    model = LED.make(NAME)
    if not hasattr(sys.modules[type(model).__module__], "create_bidirectional_mask"):
        pytest.skip("its masks are its own, too, in this version")
    mask = torch.tensor(padding, device=DEVICE)
    states = torch.randn(*mask.shape, 64, device=DEVICE)
    with pytest.raises((AttributeError, ValueError), match=r"(?i)attention.mask"):
        model(encoder_outputs=(states,), attention_mask=mask, decoder_input_ids=IDS[:2, :1])


@pytest.mark.skipif(not hasattr(transformers, DEEPSEEK_V4.model), reason="a newer model")
def test_keys_that_a_layer_adds_are_refused() -> None:
    with pytest.raises(ValueError, match=r"DeepseekV4Attention gives .* was made for 12 and 12"):
        DEEPSEEK_V4.make(NAME)(input_ids=IDS)
