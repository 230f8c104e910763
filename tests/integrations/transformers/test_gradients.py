"""No gradient is dropped silently if a model is called without `torch.no_grad()`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from flash_dist.integrations.transformers import NAME, attention, register
from tests.integrations.transformers.generation import IDS, LEFT
from tests.integrations.transformers.models import DECODERS, DEVICE, T5

Tensor = torch.Tensor
TOLERANCE = 1e-5  # relative to the largest number
PADDINGS = {"padded": LEFT, "whole": torch.ones_like(LEFT)}


def step(name: str, implementation: str, padding: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a model's logits and gradients in eval mode, for a token after a prompt."""
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


def test_a_mask_that_wants_a_gradient_gets_one() -> None:
    q, k, v = torch.randn(3, 1, 2, 4, 16, device=DEVICE)
    mask = torch.zeros(1, 1, 4, 4, device=DEVICE, requires_grad=True)
    module: Any = torch.nn.Module()
    out, _ = attention.attention_forward(module, q, k, v, mask)
    (gradient,) = torch.autograd.grad(out.square().sum(), mask)
    assert gradient.any()
    with torch.no_grad():
        attention.attention_forward(module, q, k, v, mask)


@pytest.mark.skipif(
    Version("5.4") > Version(transformers.__version__), reason="T5 has its own attention"
)
@pytest.mark.parametrize("queries", [5, IDS.shape[1]])  # queries of the decoder
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
def test_t5_and_its_position_bias_have_the_gradients_of_eager(
    padding: Tensor, queries: int
) -> None:
    found = []
    for implementation in (register(), "eager"):
        model = T5.make(implementation)
        ids = {"input_ids": IDS, "decoder_input_ids": IDS[:, :queries]}
        out = model(**ids, attention_mask=padding).logits
        out.square().sum().backward()
        gradients = {key: x.grad for key, x in model.named_parameters() if x.grad is not None}
        found.append((out, gradients))
    (out, gradients), (want, wanted) = found
    assert any("relative_attention_bias" in key for key in gradients)
    torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)
    scale = max(float(x.abs().max()) for x in wanted.values())
    torch.testing.assert_close(gradients, wanted, atol=TOLERANCE * scale, rtol=10 * TOLERANCE)


@pytest.mark.skipif(
    Version("5.4") > Version(transformers.__version__), reason="T5 has its own attention"
)
def test_t5_generates_as_eager_does() -> None:
    options = {"attention_mask": LEFT, "max_new_tokens": 4, "do_sample": False}
    ours, theirs = (T5.make(name).generate(IDS, **options) for name in (register(), "eager"))
    assert torch.equal(ours, theirs)
