"""The formulas against torch's own autograd in float64."""

from __future__ import annotations

import pytest
import torch

from flash_dist.reference import reference_backward, reference_forward, visible

SHAPES = {
    "square": (2, 7, 7, 2, 2),
    "more-keys": (1, 3, 9, 4, 2),
    "more-queries": (1, 9, 3, 4, 1),
    "one": (1, 1, 1, 1, 1),
}


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def attend_by_autograd(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    group = q.shape[2] // k.shape[2]
    kh, vh = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, kh) * 0.3
    mask = visible(q.shape[1], k.shape[1], causal=causal, device=q.device)
    scores = scores.masked_fill(~mask, -torch.inf)
    rows = mask.any(-1)
    weights = scores[:, :, rows].softmax(-1)
    out = torch.zeros_like(q)
    out[:, rows] = torch.einsum("bhqk,bkhd->bqhd", weights, vh)
    return out, scores.logsumexp(-1)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_forward_and_backward_are_those_of_autograd(
    shape: tuple[int, ...], *, causal: bool
) -> None:
    batch, seqlen_q, seqlen_k, heads, heads_kv = shape
    q = draw(batch, seqlen_q, heads, 8, seed=1).requires_grad_()
    k, v = (draw(batch, seqlen_k, heads_kv, 8, seed=i).requires_grad_() for i in (2, 3))
    dout, dlse = draw(batch, seqlen_q, heads, 8, seed=4), draw(batch, heads, seqlen_q, seed=5)
    want, want_lse = attend_by_autograd(q, k, v, causal=causal)
    finite = torch.isfinite(want_lse)
    want_grads = torch.autograd.grad((want, want_lse[finite]), (q, k, v), (dout, dlse[finite]))
    with torch.no_grad():
        out, lse = reference_forward(q, k, v, softmax_scale=0.3, causal=causal)
        grads = reference_backward(dout, q, k, v, out, lse, dlse, softmax_scale=0.3, causal=causal)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(lse, want_lse.detach())
    for got, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_a_row_without_a_key_is_zero_and_has_no_gradient() -> None:
    q, k, v = draw(1, 5, 1, 8, seed=1), draw(1, 2, 1, 8, seed=2), draw(1, 2, 1, 8, seed=3)
    out, lse = reference_forward(q, k, v, softmax_scale=1.0, causal=True)
    dq, _, _ = reference_backward(
        torch.ones_like(q), q, k, v, out, lse, None, softmax_scale=1.0, causal=True
    )
    assert (out[:, :3] == 0).all()
    assert (lse[:, :, :3] == -torch.inf).all()
    assert (dq[:, :3] == 0).all()
    assert (dq[:, 4:] != 0).any()


def test_causal_is_aligned_to_the_bottom_right() -> None:
    seen = visible(2, 4, causal=True, device=torch.device("cpu"))
    assert seen.tolist() == [[True, True, True, False], [True, True, True, True]]
