"""The tensors of one problem."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from .shapes import Shape

Tensor = torch.Tensor

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Problem:
    """Random normal q, k, v and dout, [batch, seqlen, heads, head_dim]; no batch axis if packed.

    bias: [1, num_heads_q, seqlen_q, seqlen_k]; None if the problem has no bias.
    """

    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    bias: Tensor | None = None

    @classmethod
    def draw(cls, shape: Shape, device: torch.device, *, seed: int = 0) -> Problem:
        """Return a problem with random tensors; all but dout require gradients."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, device=device).to(DTYPES[shape.dtype])

        def normal(seqlen: int, heads: int, head_dim: int) -> Tensor:
            x = draw(shape.batch, seqlen, heads, head_dim)
            return x.squeeze(0) if shape.documents else x

        heads_q, heads_kv = shape.num_heads_q, shape.num_heads_kv
        q = normal(shape.seqlen_q, heads_q, shape.head_dim)
        k = normal(shape.seqlen_k, heads_kv, shape.head_dim)
        v = k[..., : shape.head_dim_v]
        if not shape.latent:
            v = normal(shape.seqlen_k, heads_kv, shape.head_dim_v)
        dout = normal(shape.seqlen_q, heads_q, shape.head_dim_v)
        bias = draw(1, heads_q, shape.seqlen_q, shape.seqlen_k) if shape.scores == "bias" else None
        problem = cls(shape, q, k, v, dout, bias)
        for x in problem.inputs:
            x.requires_grad_()
        return problem

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The arguments q, k and v, and the bias if there is one."""
        more = () if self.bias is None else (self.bias,)
        return (self.q, self.k, self.v, *more)

    def with_own_leaves(self) -> Problem:
        """Return the problem with new autograd leaves on the same memory, without cached masks.

        NOTE: a leaf's gradient belongs to the stream on which the leaf was first used. A backward
        captured on another stream would wait for that first stream, which makes the capture fail.
        """
        q, k, v, *bias = (x.detach().requires_grad_() for x in self.inputs)
        return Problem(self.shape, q, k, v, self.dout, *bias)

    def without_scores(self) -> Problem:
        """Return the problem without its score modification."""
        return replace(self, shape=replace(self.shape, scores=""), bias=None)

    @property
    def device(self) -> torch.device:
        """The device of all tensors."""
        return self.q.device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """First token of each packed document, and the total number of tokens."""
        begins = [0, *accumulate(self.shape.documents)]
        return torch.tensor(begins, dtype=torch.int32, device=self.device)

    @cached_property
    def document_ids(self) -> Tensor:
        """The index of each packed token's document."""
        lengths = torch.tensor(self.shape.documents, device=self.device)
        return torch.arange(len(self.shape.documents), device=self.device).repeat_interleave(
            lengths
        )

    def block_ids(self, seqlen: int) -> Tensor:
        """Return the index of each token's block, for a block-causal mask."""
        tokens = torch.arange(seqlen, device=self.device)
        return (tokens * self.shape.mask.numbers[0]).div(seqlen, rounding_mode="floor").int()

    @cached_property
    def intervals(self) -> tuple[Tensor, Tensor]:
        """First visible key of every query, and the key after its last visible key."""
        pairs = list(self.shape.mask.intervals(self.shape.seqlen_q, self.shape.seqlen_k))
        found = torch.tensor(pairs, dtype=torch.int32, device=self.device)
        return found[:, 0].contiguous(), found[:, 1].contiguous()

    @cached_property
    def visible(self) -> Tensor | None:
        """The mask, [seqlen_q, seqlen_k], true for visible keys; None if all keys are visible."""
        if self.shape.mask.kind == "full":
            return None
        if self.shape.mask.kind == "random":
            return self.random_mask
        low, high = (x[:, None] for x in self.intervals)
        keys = torch.arange(self.shape.seqlen_k, device=self.device)
        return (low <= keys) & (keys < high)

    @cached_property
    def random_mask(self) -> Tensor:
        """Random mask [seqlen_q, seqlen_k] with the same number of visible keys for each query."""
        generator = torch.Generator("cpu").manual_seed(0)
        size = (self.shape.seqlen_q, self.shape.seqlen_k)
        scores = torch.rand(size, generator=generator, device="cpu")
        keys = scores.topk(self.shape.mask.count_random(self.shape.seqlen_k)).indices
        visible = torch.zeros(size, dtype=torch.bool, device="cpu")
        return visible.scatter(1, keys, value=True).to(self.device)
