"""The sets of problems that `--shapes` selects."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from .shapes import CAUSAL, FEATURES, FULL, SCORES, Mask, Shape, square

if TYPE_CHECKING:
    from collections.abc import Iterable

_TOKENS: Final = 16384  # batch * seqlen of the paper set
_WIDTH: Final = 2048  # num_heads * head_dim of the paper set at head_dim 64, 128 and 256
_BLOCKS: Final = 16
_LAYERS: Final = 18
_DOCUMENTS: Final = 64
_DOCUMENT_LENGTHS: Final = (100, 4000)
_DOCUMENT_SEED: Final = 0


def paper_shapes() -> tuple[Shape, ...]:
    """Return 42 problems, full and causal, with sequences of 1k, 4k and 16k tokens.

    head_dim 64, 128 and 256: 2048 / head_dim heads.
    head_dim 96: 16 heads.
    head_dim 192, and 128 for v, as in latent attention: 16 heads.
    head_dim 128 with grouped heads: 32 query and 8 kv heads.
    head_dim 256 with grouped heads: 8 query heads and 1 kv head.
    """
    rows = (
        *(((_WIDTH // head_dim,) * 2, (head_dim, head_dim)) for head_dim in (64, 128, 256)),
        ((16, 16), (96, 96)),
        ((16, 16), (192, 128)),
        ((32, 8), (128, 128)),
        ((8, 1), (256, 256)),
    )
    return tuple(
        Shape(_TOKENS // seqlen, seqlen, seqlen, *heads, *head_dims, mask)
        for heads, head_dims in rows
        for mask in (FULL, CAUSAL)
        for seqlen in (1024, 4096, 16384)
    )


def long_shapes() -> tuple[Shape, ...]:
    """Return 48 problems, full and causal, each with one sequence of 16k to 256k tokens.

    They have 16 query heads, and 16 or 4 kv heads.
    """
    return tuple(
        square(1, seqlen, heads, head_dim, mask)
        for head_dim in (64, 128, 256)
        for heads in ((16, 16), (16, 4))
        for mask in (FULL, CAUSAL)
        for seqlen in (_TOKENS, 4 * _TOKENS, 8 * _TOKENS, 16 * _TOKENS)
    )


def corner_shapes() -> tuple[Shape, ...]:
    """Return 16 unusual problems: few heads, few keys, head_dims of vision models and so on."""
    return (
        square(1, 16384, (1, 1), 128, CAUSAL),
        square(1, 1024, (4, 4), 128, CAUSAL),
        square(1, 256, (8, 1), 256, FULL),  # a robotics policy
        Shape(4, 16384, 77, 10, 10, 64, 64),  # image pixels attend to text tokens
        square(1024, 64, (16, 16), 64, FULL),
        square(128, 197, (12, 12), 64, FULL),  # ViT-B, patches of 16 x 16 pixels
        square(64, 257, (16, 16), 80, FULL),  # ViT-H, patches of 14 x 14 pixels
        square(16, 729, (16, 16), 72, FULL),  # SigLIP
        *(square(4, 4096, (16, 16), head_dim, CAUSAL) for head_dim in (96, 192, 32)),
        square(4, 4096, (8, 8), 40, FULL),  # a diffusion model
        square(2, 2048, (16, 16), 64, Mask("random", (50,))),
        square(1, 32768, (16, 16), 128, Mask("window", (1023, 0))),
        pack((8192,) * 8, 128, CAUSAL),
        pack((16,) * 1024, 64, FULL),
    )


def pack(lengths: tuple[int, ...], head_dim: int, mask: Mask) -> Shape:
    """Return a problem with packed documents of these lengths, and 16 heads."""
    return Shape(1, sum(lengths), sum(lengths), 16, 16, head_dim, head_dim, mask, documents=lengths)


def seed_shapes() -> tuple[Shape, ...]:
    """Return block-causal shapes of robotics policies; the last is a stack of 18 layers."""
    mask = Mask("block-causal", (_BLOCKS,))
    return (
        square(2, 1024, (8, 1), 256, mask),
        square(2, 4096, (8, 1), 256, mask),
        square(1, 16384, (8, 1), 256, mask),
        square(4, 4096, (32, 8), 128, mask),
        replace(square(2, 1024, (8, 1), 256, mask), layers=_LAYERS),
    )


def document_lengths() -> tuple[int, ...]:
    """Return the same 64 lengths of 100 to 4000 tokens on every machine; 64 divides their sum."""
    generator = random.Random(_DOCUMENT_SEED)  # noqa: S311 - not for secrets
    low, high = _DOCUMENT_LENGTHS
    lengths = [generator.randint(low, high) for _ in range(_DOCUMENTS)]
    missing = -sum(lengths) % _DOCUMENTS
    lengths[lengths.index(min(lengths))] += missing
    return tuple(lengths)


def varlen_shapes() -> tuple[Shape, ...]:
    """Return packed documents of unequal lengths, and of equal lengths with the same total.

    The set also has the documents of equal length as a batch, without packing.
    """
    unequal = document_lengths()
    length = sum(unequal) // len(unequal)
    equal = (length,) * len(unequal)
    return tuple(
        shape
        for mask in (FULL, CAUSAL)
        for shape in (
            pack(unequal, 128, mask),
            pack(equal, 128, mask),
            square(len(unequal), length, (16, 16), 128, mask),
        )
    )


def fp32_shapes() -> tuple[Shape, ...]:
    """Return float32 problems of head_dim 64, 128 and 256, full and causal."""
    return tuple(
        replace(square(2, 2048, (_WIDTH // head_dim,) * 2, head_dim, mask), dtype="fp32")
        for head_dim in (64, 128, 256)
        for mask in (FULL, CAUSAL)
    )


def score_shapes() -> tuple[Shape, ...]:
    """Return 24 problems, full and causal: plain, or with a soft cap, ALiBi or sinks.

    Each has 4 sequences of 4k tokens.
    """
    return _with_scores(4, 4096, SCORES)


def feature_shapes() -> tuple[Shape, ...]:
    """Return 12 problems, full and causal: with dropout, or with a bias that has a gradient.

    Each has 8 sequences of 2k tokens.
    """
    return _with_scores(8, 2048, FEATURES)


def _with_scores(batch: int, seqlen: int, kinds: Iterable[str]) -> tuple[Shape, ...]:
    """Return a problem for each head_dim, mask and kind of score modification."""
    return tuple(
        replace(square(batch, seqlen, (_WIDTH // head_dim,) * 2, head_dim, mask), scores=kind)
        for head_dim in (64, 128, 256)
        for mask in (FULL, CAUSAL)
        for kind in kinds
    )


def decode_shapes() -> tuple[Shape, ...]:
    """Return problems with one query per sequence, and caches of 1 MB to 2 GB.

    Some have head_dim 64, 128 or 256, and 8 kv heads or 1. The others have latent keys (MLA), and
    16, 64 or 128 query heads.
    """
    lengths = (1, 131072), (64, 4096), (256, 1024), (1, 4096)
    plain = (
        (heads, (head_dim, head_dim)) for head_dim in (64, 128, 256) for heads in ((32, 8), (8, 1))
    )
    latent = (((heads, 1), (576, 512)) for heads in (16, 64, 128))
    return tuple(
        Shape(batch, 1, seqlen, *heads, *head_dims, cached=True)
        for heads, head_dims in (*plain, *latent)
        for batch, seqlen in lengths
    )
