"""Models under torch.jit.trace and FakeTensorMode: values that a trace would keep are refused."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from flash_dist.integrations.transformers import register
from tests.integrations.transformers.models import DECODERS, DEVICE, VOCABULARY

Tensor = torch.Tensor

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.4"), reason="5.4 made masks anew"
)

NAME = register()
IDS = torch.randint(3, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(1)).to(DEVICE)
LEFT = torch.ones_like(IDS)
LEFT[0, :4] = 0
DOCUMENTS = torch.cat([torch.arange(6), torch.arange(8)])[None].to(DEVICE)


class Logits(torch.nn.Module):
    """Wraps a model for torch.jit.trace: the inputs are tensors, the output is one tensor."""

    def __init__(self, *names: str) -> None:
        """Set the names of the arguments that follow the tokens."""
        super().__init__()
        self.model = DECODERS["llama"].make(NAME)
        self.names = names

    def forward(self, tokens: Tensor, *others: Tensor) -> Tensor:
        """Return the logits."""
        named = dict(zip(self.names, others, strict=True))
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, **named).logits
        return logits


def trace(module: Logits, *inputs: Tensor) -> Any:  # noqa: ANN401
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module, inputs)


def test_a_trace_serves_other_lengths_and_trains() -> None:
    module = Logits()
    traced = trace(module, IDS[:, :9])
    for tokens in (IDS[:, :9], IDS, IDS[:1, :5]):
        got, want = traced(tokens), module(tokens)
        torch.testing.assert_close(got, want)
    got.sum().backward()
    assert module.model.model.layers[0].self_attn.q_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize(
    ("name", "tokens", "value"),
    [
        ("attention_mask", IDS, LEFT),
        ("attention_mask", IDS, torch.ones_like(IDS)),
        ("attention_mask", IDS, torch.ones(2, 1, 14, 14, device=DEVICE).bool().tril()),
        ("position_ids", IDS[:1], DOCUMENTS),
    ],
    ids=["padding", "tokens", "own mask", "documents"],
)
def test_what_a_trace_would_keep_is_refused(name: str, tokens: Tensor, value: Tensor) -> None:
    with pytest.raises(ValueError, match=f"torch.jit.trace must be given no {name}, got one"):
        trace(Logits(name), tokens, value)


@pytest.mark.parametrize("padded", [False, True], ids=["plain", "padded"])
def test_tensors_without_numbers_go_through_a_model(padded: bool) -> None:  # noqa: FBT001
    model = DECODERS["llama"].make(NAME)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        tokens, mask = mode.from_tensor(IDS), mode.from_tensor(LEFT) if padded else None
        logits = model(input_ids=tokens, attention_mask=mask).logits
    assert isinstance(logits, FakeTensor)
    assert (logits.shape, logits.requires_grad) == ((2, 14, VOCABULARY), True)
