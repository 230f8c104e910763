"""Sums on the CPU whose order depends only on the positions of their terms.

torch's matrix products choose an order by the sizes of a call, so the bits of a query's result
depend on the number of other queries. These functions add the second half of the terms to the first
half until one term is left. This is slower, but has the same order for every query. A longer sum
has the same bits if the additional terms are 0.
"""

from __future__ import annotations

from typing import Final

import torch

Tensor = torch.Tensor

_TERMS: Final = 1 << 20  # number of products computed at a time


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b: [..., rows, n] by [..., n, columns]."""
    rows = max(_TERMS // max(b.numel(), 1), 1)
    return torch.cat([add_up(x.unsqueeze(-1) * b.unsqueeze(-3)) for x in a.split(rows, -2)], -2)


def add_up(x: Tensor) -> Tensor:
    """Return the sums of x [..., n, columns] over n, as [..., columns]; overwrite x."""
    n = x.shape[-2]
    if n == 0:
        return x.new_zeros((*x.shape[:-2], x.shape[-1]))
    while n > 1:
        half = 1 << (n - 1).bit_length() - 1
        x[..., : n - half, :] += x[..., half:n, :]
        n = half
    return x[..., 0, :] + 0.0  # turns -0 into +0


def logsumexp(x: Tensor) -> Tensor:
    """Return log(sum(exp(x))) over the last axis, which is kept; -inf without terms."""
    if x.shape[-1] == 0:
        return x.new_full((*x.shape[:-1], 1), -torch.inf)
    top = _finite(x.amax(-1, keepdim=True))
    return add_up((x - top).exp().unsqueeze(-1)).log() + top


def logaddexp(a: Tensor, b: Tensor) -> Tensor:
    """Return log(exp(a) + exp(b)).

    torch.logaddexp is not used, because it may round the last elements of a tensor differently.
    """
    top = _finite(torch.maximum(a, b))
    return ((a - top).exp() + (b - top).exp()).log() + top


def _finite(top: Tensor) -> Tensor:
    return top.masked_fill(top.isinf(), 0.0)
