"""merge_attention: values, rows without a key, gradients."""

from __future__ import annotations

import pytest
import torch

from flash_dist import flash_attn_func, flash_attn_varlen_func, merge_attention
from flash_dist.context_parallel.merge import add_attention

Tensor = torch.Tensor
INF = float("inf")


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def parts(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return out and lse of a and b: row 0 saw keys in b only, row 1 in a only, row 2 in none."""
    lse_a, lse_b = draw(2, 3, 5, seed=1), draw(2, 3, 5, seed=2)
    lse_a[:, :, [0, 2]] = -INF
    lse_b[:, :, [1, 2]] = -INF
    return (
        draw(2, 5, 3, 8, seed=3, dtype=dtype),
        lse_a,
        draw(2, 5, 3, 8, seed=4, dtype=dtype),
        lse_b,
    )


@pytest.mark.parametrize("grouped", [False, True], ids=["4-D", "5-D"])
def test_two_halves_of_the_keys_make_the_whole(*, grouped: bool) -> None:
    q, k, v = draw(2, 7, 4, 16), draw(2, 10, 2, 16, seed=1), draw(2, 10, 2, 8, seed=2)
    q = q.unflatten(2, (2, 2)) if grouped else q
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = flash_attn_func(q, k, v, return_lse=True)
    first = flash_attn_func(q, k[:, :4], v[:, :4], return_lse=True)
    second = flash_attn_func(q, k[:, 4:], v[:, 4:], return_lse=True)
    got = merge_attention(*first, *second)
    torch.testing.assert_close(got, want)
    upstream = [draw(x.numel(), seed=5).view(x.shape) for x in want]
    torch.testing.assert_close(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream)
    )


def test_packed_halves_make_the_whole() -> None:
    q, k, v = draw(9, 4, 16), draw(12, 2, 16, seed=1), draw(12, 2, 16, seed=2)
    cu_q, cu_k = torch.tensor([0, 4, 9]).int(), torch.tensor([0, 6, 12]).int()
    want = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 5, 6, return_lse=True)
    halves: list[Tensor] = []
    for keys in ([0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]):
        halves += flash_attn_varlen_func(
            q, k[keys], v[keys], cu_q, torch.tensor([0, 3, 6]).int(), 5, 3, return_lse=True
        )
    torch.testing.assert_close(merge_attention(*halves), want)


@pytest.mark.parametrize("grouped", [False, True], ids=["4-D", "5-D"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["fp64", "bf16"])
def test_adding_in_place_is_merging(dtype: torch.dtype, *, grouped: bool) -> None:
    out_a, lse_a, out_b, lse_b = parts(dtype)
    if grouped:
        out_a, out_b = out_a.unflatten(2, (3, 1)), out_b.unflatten(2, (3, 1))
    wide = out_a.to(lse_a.dtype)
    want = merge_attention(wide, lse_a, out_b, lse_b)
    rows = slice(1, None)  # as in ring attention
    got = wide.clone(), lse_a.clone()
    add_attention(got[0][:, rows], got[1][..., rows], out_b[:, rows], lse_b[..., rows])
    torch.testing.assert_close(got[0][:, rows], want[0][:, rows])
    torch.testing.assert_close(got[1][..., rows], want[1][..., rows])
    assert torch.equal(got[0][:, :1], wide[:, :1])
    assert torch.equal(got[1][..., :1], lse_a[..., :1])


def test_a_row_that_one_side_did_not_see_keeps_its_values() -> None:
    out_a, lse_a, out_b, lse_b = parts(torch.bfloat16)
    lse_a, lse_b = lse_a.float(), lse_b.float()
    out_a[:, 0] = torch.nan  # arbitrary values in a row without keys
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert torch.equal(out[:, 0], out_b[:, 0])
    assert torch.equal(lse[:, :, 0], lse_b[:, :, 0])
    assert torch.equal(out[:, 1], out_a[:, 1])
    assert torch.equal(lse[:, :, 1], lse_a[:, :, 1])
    assert (out[:, 2] == 0).all()
    assert (lse[:, :, 2] == -INF).all()


def test_the_order_of_two_does_not_matter() -> None:
    out_a, lse_a, out_b, lse_b = parts(torch.bfloat16)
    there, back = (
        merge_attention(out_a, lse_a, out_b, lse_b),
        merge_attention(out_b, lse_b, out_a, lse_a),
    )
    assert all(map(torch.equal, there, back))


def test_shares_that_are_far_apart_do_not_overflow() -> None:
    out = draw(1, 2, 1, 8)
    lse = torch.tensor([[[1e4, -1e4]]], dtype=torch.float64)
    merged, total = merge_attention(out, lse, -out, -lse)
    assert torch.equal(merged, torch.stack([out[:, 0], -out[:, 1]], 1))
    assert torch.equal(total, lse.abs())


def test_the_wider_dtype_is_kept() -> None:
    out_a, lse_a, out_b, lse_b = parts()
    out, lse = merge_attention(out_a.float(), lse_a.float(), out_b.bfloat16(), lse_b.float())
    assert (out.dtype, lse.dtype) == (torch.float32, torch.float32)


def test_gradients_pass_gradcheck_twice() -> None:
    inputs = [
        x.requires_grad_()
        for x in (draw(1, 3, 2, 4), draw(1, 2, 3), draw(1, 3, 2, 4, seed=1), draw(1, 2, 3, seed=2))
    ]
    assert torch.autograd.gradcheck(merge_attention, inputs)
    assert torch.autograd.gradgradcheck(merge_attention, inputs)


def test_rows_without_a_key_have_finite_gradients_of_the_right_side() -> None:
    leaves = [x.requires_grad_() for x in parts()]
    out, lse = merge_attention(*leaves)
    seen = torch.isfinite(lse)
    d_out_a, d_lse_a, d_out_b, d_lse_b = torch.autograd.grad(
        out.square().sum() + lse[seen].sum(), leaves
    )
    assert all(torch.isfinite(x).all() for x in (d_out_a, d_lse_a, d_out_b, d_lse_b))
    assert (d_out_a[:, [0, 2]] == 0).all()
    assert (d_lse_a[:, :, [0, 2]] == 0).all()
    assert torch.equal(d_out_b[:, 0], 2 * leaves[2][:, 0].detach())
    assert (d_lse_b[:, :, 0] == 1).all()
    assert (d_out_b[:, [1, 2]] == 0).all()


def test_it_compiles_without_a_graph_break() -> None:
    tensors = parts()
    compiled = torch.compile(merge_attention, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(*tensors), merge_attention(*tensors)))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda a, b, c, d: (a, b, c[:1], d), ValueError, "a and b must have the same shapes"),
        (lambda a, b, c, d: (a, b.mT, c, d.mT), ValueError, r"lse_a must be \[batch, num_heads_q"),
        (lambda a, b, c, d: (a.int(), b, c, d), TypeError, "out_a must be .* float64, got int32"),
        (lambda a, b, c, d: (a, b, c * 1j, d), TypeError, "out_b must be .*, got complex128"),
        (lambda a, b, c, d: (a, b, c.to_sparse(), d), ValueError, "out_b must be a dense tensor"),
        (lambda a, b, c, d: (a, b.half(), c, d), TypeError, "lse_a must be float32 or float64"),
        (lambda a, b, _, d: (a, b, 1.0, d), TypeError, r"out_b must be a torch\.Tensor, got float"),
        (lambda a, b, c, d: (a, b, c.to("meta"), d), ValueError, "same device, got cpu and meta"),
    ],
    ids=["shapes", "rows", "integers", "complex", "sparse", "dtype", "no-tensor", "device"],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_words(
    change: object, error: type[Exception], text: str
) -> None:
    assert callable(change)
    with pytest.raises(error, match=text):
        merge_attention(*change(*parts()))


def test_a_row_whose_lse_is_infinite_has_all_of_the_weight() -> None:
    """A sink of +inf makes such rows."""
    out_a, lse_a, out_b, lse_b = parts()
    lse_a[:, :, 0] = lse_b[:, :, 1] = lse_a[:, :, 3] = lse_b[:, :, 3] = INF
    leaves = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = merge_attention(*leaves)
    assert torch.equal(out[:, 0], out_a[:, 0])
    assert torch.equal(out[:, 1], out_b[:, 1])
    assert (lse[:, :, [0, 1, 3]] == INF).all()
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(bool(x.isfinite().all()) for x in grads)
