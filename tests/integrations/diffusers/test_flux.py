"""A tiny Flux of diffusers, whose default backend calls torch's function, inside of sdpa()."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flash_dist
from flash_dist.attention import autograd
from flash_dist.integrations.torch_sdpa import replacement

diffusers = pytest.importorskip("diffusers")

Tensor = torch.Tensor


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    return model


def draw() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 32),
        "txt_ids": torch.randn(5, 3),
        "img_ids": torch.randn(16, 3),
        "timestep": torch.ones(1),
    }


def run(model: torch.nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all parameters."""
    model.zero_grad()
    out: Tensor = model(**inputs).sample
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


def test_its_default_backend_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    attend = autograd.attend

    def count(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        calls.append(tuple(q.shape))
        return attend(q, *args, **options)

    model, inputs = make(), draw()
    want = run(model, inputs)
    monkeypatch.setattr(replacement, "attend", count)
    with flash_dist.sdpa():
        got = run(model, inputs)
    assert len(calls) == 2, "one for each layer"
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
