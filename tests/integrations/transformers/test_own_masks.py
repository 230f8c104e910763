"""Masks that a caller makes hide keys as in eager attention and sdpa; some rows see no key."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch

from flash_dist.integrations.transformers import attention, register
from tests.integrations.transformers.generation import BATCH, IDS, SEQLEN
from tests.integrations.transformers.models import DECODERS, DEVICE

Tensor = torch.Tensor

NAME = register()
LOWEST = {str(x)[6:]: torch.finfo(x).min for x in (torch.float16, torch.bfloat16, torch.float32)}
HIDING = {**LOWEST, "openpi": -2.3819763e38, "-1e9": -1e9, "-inf": -torch.inf}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

PREFIX = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril()
PREFIX[:5, :5] = True
SEEN = PREFIX.expand(BATCH, 1, -1, -1).clone()
SEEN[1, :, 9:, 3:5] = False
SEEN = SEEN.to(DEVICE)


def add(low: float, dtype: torch.dtype) -> Tensor:
    return torch.where(SEEN, 0.0, low).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("low", HIDING.values(), ids=list(HIDING))
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_low_numbers_hide_in_every_dtype(family: str, low: float, dtype: torch.dtype) -> None:
    wants = DECODERS[family].make("eager")(IDS, attention_mask=add(low, torch.float32)).logits
    model = DECODERS[family].make(NAME)
    got = model(IDS, attention_mask=add(low, dtype)).logits
    torch.testing.assert_close(got, wants, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_rule_holds_for_all_ways_to_say_it(dtype: torch.dtype) -> None:
    """In bfloat16 the lowest float32 becomes -inf, and the lowest float16 becomes -65536."""
    model = DECODERS["llama"].make(NAME, dtype)
    outs = [model(IDS, attention_mask=add(low, dtype)).logits for low in HIDING.values()]
    outs.append(model(IDS, attention_mask=SEEN).logits)
    for out in outs:
        assert torch.equal(out, outs[0])
    want, own = (
        DECODERS["llama"].make("sdpa", x)(IDS, attention_mask=SEEN).logits
        for x in (torch.float32, dtype)
    )
    errors = [(out - want).abs().max() / want.abs().max() for out in (outs[0], own)]
    assert errors[0] <= 2 * errors[1] + 1e-5


@pytest.mark.parametrize("low", [-10000.0, -1000.0, -0.5])
def test_a_number_above_is_added(low: float) -> None:
    mask = add(low, torch.float32)
    got, want = (DECODERS["llama"].make(x)(IDS, attention_mask=mask) for x in (NAME, "eager"))
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)


def attend(how: str, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first query's out by an attention of transformers, and the mean of the values."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(1, 1, 3, 16, generator=generator).to(DEVICE)
    k, v = torch.randn(2, 1, 1, 4, 16, generator=generator).to(DEVICE)
    module: Any = torch.nn.Module()
    module.num_key_value_groups = 1
    own = "transformers.integrations.sdpa_attention", "transformers.models.llama.modeling_llama"
    function: Any = {
        "sdpa": import_module(own[0]).sdpa_attention_forward,
        "eager": import_module(own[1]).eager_attention_forward,
        NAME: attention.attention_forward,
    }[how]
    out, _ = function(module, q, k, v, mask.to(DEVICE), scaling=0.25, dropout=0.0)
    return out[0, 0, 0], v.mean((0, 1, 2))


@pytest.mark.parametrize(
    ("low", "eager", "sdpa"),
    [
        pytest.param(torch.finfo(torch.float32).min, "mean", "mean", id="the lowest float32"),
        pytest.param(-1e9, "mean", "mean", id="-1e9"),
        pytest.param(-torch.inf, "nan", "zero", id="-inf"),
    ],
)
def test_a_row_that_sees_no_key_is_zero_here_and_something_else_elsewhere(
    low: float, eager: str, sdpa: str
) -> None:
    mask = torch.zeros(1, 1, 3, 4)
    mask[:, :, 0] = low
    for how, wanted in (("eager", eager), ("sdpa", sdpa), (NAME, "zero")):
        out, mean = attend(how, mask)
        wants = {"mean": mean, "zero": torch.zeros_like(mean), "nan": mean * torch.nan}[wanted]
        torch.testing.assert_close(out, wants, equal_nan=True)


@pytest.mark.parametrize(("queries", "keys"), [(5, 3), (3, 5), (1, 5), (4, 4)])
def test_a_causal_layer_without_a_mask_begins_at_the_first_key_as_in_sdpa(
    queries: int, keys: int
) -> None:
    q = torch.randn(1, 2, queries, 16, device=DEVICE)
    k, v = torch.randn(2, 1, 2, keys, 16, device=DEVICE)
    module: Any = torch.nn.Module()
    own = import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    want, _ = own(module, q, k, v, None, is_causal=True)
    got, _ = attention.attention_forward(module, q, k, v, None, is_causal=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_a_mask_of_all_keys_is_refused_by_a_layer_whose_cache_has_the_last_ones() -> None:
    """The layer would cut the mask at the wrong end; eager attention raises an error of torch."""
    seen = torch.ones(BATCH, 1, 2, SEQLEN, dtype=torch.bool, device=DEVICE)
    seen[:, :, 0, -1] = False
    for name, error in (("eager", RuntimeError), (NAME, ValueError)):
        model = DECODERS["mistral"].make(name)
        cache = model(IDS[:, :-2], use_cache=True).past_key_values
        mask = seen if name == NAME else torch.where(seen, 0.0, -torch.inf)
        with pytest.raises(error, match=r"must (broadcast|match)"):
            model(IDS[:, -2:], attention_mask=mask, past_key_values=cache)


def test_a_gradient_of_a_mask_is_never_dropped() -> None:
    found = []
    for name in (NAME, "sdpa"):
        learned = torch.where(SEEN, 0.0, -torch.inf).requires_grad_()
        logits = DECODERS["llama"].make(name)(IDS, attention_mask=learned).logits
        found.append((logits, *torch.autograd.grad(logits.square().sum(), learned)))
    (got, gradient), (want, wanted) = found
    assert wanted.any()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
