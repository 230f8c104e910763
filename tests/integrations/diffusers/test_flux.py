"""A tiny Flux of diffusers on these kernels: through sdpa(), or by name.

It also tests single layers, with the masks of its models.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flash_dist
from flash_dist.attention import autograd
from flash_dist.integrations.diffusers import NAME, attention, register
from flash_dist.integrations.torch_sdpa import masks, replacement

if TYPE_CHECKING:
    from collections.abc import Iterator

diffusers = pytest.importorskip("diffusers")
dispatch = pytest.importorskip("diffusers.models.attention_dispatch").dispatch_attention_fn

Tensor = torch.Tensor


@pytest.fixture(autouse=True)
def _its_own_backend() -> Iterator[None]:
    """Restore diffusers' default backend: the name that one model sets applies to all models."""
    with diffusers.attention_backend("native"):
        yield


def make() -> Any:  # noqa: ANN401
    torch.manual_seed(0)
    return diffusers.FluxTransformer2DModel(
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


def draw() -> dict[str, Tensor]:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 5, 32),
        "pooled_projections": torch.randn(1, 32),
        "txt_ids": torch.randn(5, 3),
        "img_ids": torch.randn(16, 3),
        "timestep": torch.ones(1),
    }


def run(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:  # noqa: ANN401
    """Return the output and the gradients of all parameters."""
    model.zero_grad()
    out: Tensor = model(**inputs).sample
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in model.parameters() if x.grad is not None)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Return the shapes of the queries that our kernels get."""
    shapes: list[tuple[int, ...]] = []
    attend = autograd.attend

    def count(q: Tensor, *args: Any, **options: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
        shapes.append(tuple(q.shape))
        return attend(q, *args, **options)

    monkeypatch.setattr(replacement, "attend", count)
    return shapes


def require_near(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_its_default_backend_is_served_by_the_context(calls: list[tuple[int, ...]]) -> None:
    model, inputs = make(), draw()
    want = run(model, inputs)
    assert not calls
    with flash_dist.sdpa():
        got = run(model, inputs)
    assert len(calls) == 2, "one for each layer"
    require_near(got, want)


def test_a_model_takes_the_backend_by_its_name(calls: list[tuple[int, ...]]) -> None:
    model, inputs = make(), draw()
    want = run(model, inputs)
    name = register()
    assert name == register() == NAME
    model.set_attention_backend(name)
    got = run(model, inputs)
    assert calls == [(1, 21, 2, 16)] * 2, "one for each layer"
    require_near(got, want)
    model.set_attention_backend("native")
    run(model, inputs)
    assert len(calls) == 2, "it is no longer asked"


def test_a_block_takes_the_backend_by_its_name(calls: list[tuple[int, ...]]) -> None:
    model, inputs = make(), draw()
    want = run(model, inputs)
    with diffusers.attention_backend(register()):
        got = run(model, inputs)
    assert len(calls) == 2
    require_near(got, want)
    run(model, inputs)
    assert len(calls) == 2


def test_the_name_is_a_member_like_those_of_diffusers() -> None:
    names = diffusers.AttentionBackendName
    before = len(names)
    name = register()
    member = names(name)
    assert member is names[name.upper()] is getattr(names, name.upper())
    assert member in set(names)
    assert (member.value, member.name, str(member.value)) == (name, name.upper(), name)
    assert len(names) <= before + 1
    assert pickle.loads(pickle.dumps(member)) is member  # noqa: S301 - our own


def draw_layer() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 9, 4, 16, generator=generator)
    k, v = torch.randn(2, 3, 7, 4, 16, generator=generator)
    return q, k, v


KEYS = torch.arange(7) < torch.tensor([[7], [4], [2]])
PAIRS = torch.arange(7) <= torch.arange(9)[:, None] % 5
MASKS = {
    "keys": KEYS,
    "keys, added": torch.where(KEYS, 0.0, -torch.inf),
    "all keys": torch.ones_like(KEYS),
    "pairs": PAIRS,
    "batch and pairs": (KEYS[:, None] & PAIRS)[:, None],
    **{
        f"keys, added as {low}": torch.where(KEYS, 0.0, low)
        for low in (torch.finfo(torch.float32).min, -2.3819763e38, -1e9, -65504.0)
    },
}
BIASES = {
    "random": torch.randn(9, 7, generator=torch.Generator().manual_seed(4)),
    "-10000 for hidden keys": ((1 - KEYS.float()) * -10000.0)[:, None, None],
}
OWN = {
    "block": flash_dist.BlockMask.from_dense((KEYS[:, None] & PAIRS)[:, None]),
    "interval": flash_dist.IntervalMask.of(
        torch.zeros(3, 9, dtype=torch.int32),
        KEYS.sum(1, dtype=torch.int32)[:, None].expand(3, 9),
        seqlen_k=7,
    ),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_masks_hide_what_they_hide_from_torch(calls: list[tuple[int, ...]], mask: Tensor) -> None:
    q, k, v = draw_layer()
    wide = mask[:, None, None] if mask.shape == KEYS.shape else mask
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    want = scaled_dot_product_attention(query, key, value, attn_mask=wide).transpose(1, 2)
    got = dispatch(q, k, v, attn_mask=mask, backend=register())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("mask", OWN.values(), ids=list(OWN))
def test_masks_of_ours_are_served(calls: list[tuple[int, ...]], mask: Any) -> None:  # noqa: ANN401
    q, k, v = draw_layer()
    is_block = isinstance(mask, flash_dist.BlockMask)
    pairs = mask.visible(3, 1, 9, 7) if is_block else mask.visible()
    want = dispatch(q, k, v, attn_mask=pairs.view(3, 1, 9, 7))
    got = dispatch(q, k, v, attn_mask=mask, backend=register())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


def test_a_mask_of_ours_that_torch_would_get_is_refused() -> None:
    q, k, v = draw_layer()
    with pytest.raises(ValueError, match=r"must be a tensor or None .*BlockMask: .*is_causal"):
        dispatch(q, k, v, attn_mask=OWN["block"], is_causal=True, backend=register())


@pytest.mark.parametrize("bias", BIASES.values(), ids=list(BIASES))
def test_biases_are_served(calls: list[tuple[int, ...]], bias: Tensor) -> None:
    q, k, v = draw_layer()
    want = dispatch(q, k, v, attn_mask=bias)
    got = dispatch(q, k, v, attn_mask=bias, backend=register())
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert len(calls) == 1


@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -torch.inf], ids=str)
def test_a_sequence_without_keys_is_zero_and_torchs_may_be_the_mean(low: float) -> None:
    q, k, v = draw_layer()
    mask = torch.where(KEYS, 0.0, low)
    mask[1] = low
    got = dispatch(q, k, v, attn_mask=mask, backend=register())
    assert not got[1].any()
    own = dispatch(q, k, v, attn_mask=mask)
    wants = torch.zeros(4, 16) if low == -torch.inf else v[1].mean(0)
    torch.testing.assert_close(own[1], wants.expand(9, -1, -1))


def test_a_mask_of_keys_is_read_once_until_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw_layer()
    read: list[Tensor] = []

    look = masks._read

    def note(mask: Tensor, shape: tuple[int, int, int, int]) -> Any:  # noqa: ANN401
        read.append(mask)
        return look(mask, shape)

    monkeypatch.setattr(masks, "_read", note)
    mask, name = KEYS.clone(), register()
    first = [dispatch(q, k, v, attn_mask=mask, backend=name) for _ in range(3)]
    assert len(read) == 1
    mask[0, 5:] = False
    changed = dispatch(q, k, v, attn_mask=mask, backend=name)
    assert len(read) == 2
    assert torch.equal(first[0], first[2])
    assert not torch.equal(changed[0], first[0][0])


def test_what_has_no_kernel_goes_to_torch(calls: list[tuple[int, ...]]) -> None:
    q, k, v = draw_layer()
    want = dispatch(q, k, v, scale=-1.0)
    got = dispatch(q, k, v, scale=-1.0, backend=register())
    assert torch.equal(got, want)
    assert not calls


def test_a_compiled_model_is_one_graph() -> None:
    model, inputs = make(), draw()
    want = run(model, inputs)
    model.set_attention_backend(register())
    torch._dynamo.reset()
    with torch.no_grad():
        compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
        out = compiled(**inputs).sample
    torch.testing.assert_close(out, want[0], rtol=1e-4, atol=1e-5)


def test_sequences_over_several_gpus_are_refused() -> None:
    q, k, v = draw_layer()
    with pytest.raises(ValueError, match=r"without context parallelism .*\n\nhint: `set_attention"):
        attention.attend(q, k, v, _parallel_config=object())
