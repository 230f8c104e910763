"""No gradient is dropped silently if a model is called without `torch.no_grad()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flash_dist.integrations.transformers import NAME, attention
from tests.integrations.transformers.generation import IDS, LEFT
from tests.integrations.transformers.models import DECODERS, DEVICE

Tensor = torch.Tensor
TOLERANCE = 1e-5  # of the largest number
PADDINGS = {"padded": LEFT, "whole": torch.ones_like(LEFT)}


def step(name: str, implementation: str, padding: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return logits and gradients of a token after a prompt, of a model in eval mode."""
    model = DECODERS[name].make(implementation)
    past = model(IDS[:, :-1], attention_mask=padding[:, :-1], use_cache=True).past_key_values
    out = model(IDS[:, -1:], attention_mask=padding, past_key_values=past).logits
    out.square().sum().backward()
    return out, {key: x.grad for key, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_a_token_behind_a_cache_has_the_gradients_of_eager(name: str, padding: Tensor) -> None:
    out, gradients = step(name, NAME, padding)
    want, wanted = step(name, "eager", padding)
    assert out.requires_grad
    assert gradients.keys() == wanted.keys()
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
    scale = max(float(x.abs().max()) for x in wanted.values())
    torch.testing.assert_close(gradients, wanted, atol=TOLERANCE * scale, rtol=10 * TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_generate_needs_no_context_of_the_caller(name: str) -> None:
    model = DECODERS[name].make(NAME, torch.bfloat16)
    assert torch.is_grad_enabled()
    ids = model.generate(IDS, attention_mask=LEFT, max_new_tokens=3, do_sample=False)
    assert ids.shape == (IDS.shape[0], IDS.shape[1] + 3)


def test_a_mask_that_wants_a_gradient_is_refused() -> None:
    q, k, v = torch.ones(3, 1, 2, 4, 16, device=DEVICE)
    mask = torch.zeros(1, 1, 4, 4, device=DEVICE, requires_grad=True)
    module: Any = torch.nn.Module()
    with pytest.raises(ValueError, match=r"(?s)a gradient of its attention_mask.*hint: "):
        attention.attention_forward(module, q, k, v, mask)
    with torch.no_grad():
        attention.attention_forward(module, q, k, v, mask)
