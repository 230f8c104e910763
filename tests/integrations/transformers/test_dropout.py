"""A model in train() equals eager attention with the same dropped weights: outputs, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

import flash_dist
from flash_dist.integrations.transformers import NAME, register
from tests.integrations.transformers.models import DEVICE, ENCODERS, VOCABULARY

Tensor = torch.Tensor

register()
IDS = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(1)).to(DEVICE)
PADDING = torch.ones_like(IDS).index_fill(1, torch.arange(9, 12, device=DEVICE), 0)
P = 0.25  # a multiple of 1 / 65536

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.0"),
    reason="before 5.0 these models have attention of their own",
)


def drop(weights: Tensor, p: float, training: bool, *_: Any) -> Tensor:  # noqa: ANN401, FBT001
    """Replace torch's dropout: drop the weights that the package would drop in this call."""
    if not training or p == 0.0:
        return weights
    gone = flash_dist.dropout_mask(p, weights.shape, device=weights.device)
    return weights.masked_fill(gone, 0.0) / (1.0 - p)


def train(name: str, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the states of all tokens except padding, and the gradients, of one step."""
    chances: dict[str, Any] = {"attention_probs_dropout_prob": P, "hidden_dropout_prob": 0.0}
    model = ENCODERS[name].make(implementation, **chances).train()
    torch.manual_seed(3)
    states = model(input_ids=IDS, attention_mask=PADDING).last_hidden_state[:, :9]
    states.square().sum().backward()
    return states, {key: x.grad for key, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_a_model_that_trains_drops_what_eager_attention_would(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, gradients = train(name, NAME)
    assert torch.equal(states, train(name, NAME)[0])
    monkeypatch.setattr(torch.nn.functional, "dropout", drop)
    want, wanted = train(name, "eager")
    torch.testing.assert_close(states, want, atol=1e-4, rtol=1e-4)
    assert gradients.keys() == wanted.keys()
    scale = max(float(x.abs().max()) for x in wanted.values())
    torch.testing.assert_close(gradients, wanted, atol=1e-5 * scale, rtol=1e-4)
    monkeypatch.setattr(torch.nn.functional, "dropout", lambda x, *_, **__: x)
    assert not torch.allclose(states, train(name, "eager")[0], atol=1e-3)
