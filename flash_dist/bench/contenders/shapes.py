"""The problems that are measured, the masks on them and how much work they are; no torch here.

Only what the mask leaves visible counts as work.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ...errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

MASKS: Final = ("full", "causal", "window:LEFT,RIGHT", "block-causal:BLOCKS", "prefix:LENGTH")
DTYPES: Final = ("bf16", "fp16", "fp32")
SETS: Final = ("paper", "seed", "varlen", "fp32", "mine")

_NUMBERS: Final = {"full": 0, "causal": 0, "window": 2, "block-causal": 1, "prefix": 1}

_TOKENS: Final = 16384  # batch * seqlen of the paper set
_WIDTH: Final = 2048  # num_heads * head_dim of the paper set
_BLOCKS: Final = 16
_LAYERS: Final = 18
_DOCUMENTS: Final = 64
_DOCUMENT_LENGTHS: Final = (100, 4000)
_DOCUMENT_SEED: Final = 0

BACKWARD: Final = 2.5  # backward over forward: five products instead of two

# A checkpoint's second forward is no visible work.
PASSES: Final = {
    "forward": 1.0,
    "backward": BACKWARD,
    "both": 1 + BACKWARD,
    "checkpointed": 1 + BACKWARD,
}


@dataclass(frozen=True)
class Mask:
    """Which keys a query sees: one interval per query. Printed and parsed as `window:128,0`."""

    kind: str
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Read a mask of the command line."""
        kind, _, rest = text.partition(":")
        parts = rest.split(",") if rest else []
        known = kind in _NUMBERS and len(parts) == _NUMBERS[kind]
        if not known or not all(part.isdecimal() for part in parts):
            message = f"mask must be one of {', '.join(MASKS)}, got `{text}`"
            raise UsageError(message, hint="`--mask block-causal:16` has 16 blocks of equal length")
        numbers = tuple(int(part) for part in parts)
        if kind == "block-causal" and numbers[0] == 0:
            message = f"block-causal needs at least 1 block, got `{text}`"
            raise UsageError(message)
        return cls(kind, numbers)

    def __str__(self) -> str:
        numbers = ",".join(map(str, self.numbers))
        return f"{self.kind}:{numbers}" if numbers else self.kind

    def intervals(self, seqlen_q: int, seqlen_k: int) -> Iterator[tuple[int, int]]:
        """Return first and end key of every query. Causal and window align to the bottom right."""
        shift = seqlen_k - seqlen_q
        for i in range(seqlen_q):
            low, high = 0, seqlen_k
            if self.kind == "causal":
                high = i + shift + 1
            elif self.kind == "window":
                low, high = i + shift - self.numbers[0], i + shift + self.numbers[1] + 1
            elif self.kind == "prefix":
                high = max(i + shift + 1, self.numbers[0])
            elif self.kind == "block-causal":
                blocks = self.numbers[0]
                block = i * blocks // seqlen_q
                high = -(-(block + 1) * seqlen_k // blocks)
            low, high = max(low, 0), min(high, seqlen_k)
            yield (low, high) if low < high else (0, 0)


FULL: Final = Mask("full")
CAUSAL: Final = Mask("causal")


@dataclass(frozen=True)
class Shape:
    """One problem. With documents (lengths), tokens are packed; with layers, it is a stack."""

    batch: int
    seqlen_q: int
    seqlen_k: int
    num_heads_q: int
    num_heads_kv: int
    head_dim: int
    head_dim_v: int
    mask: Mask = FULL
    dtype: str = "bf16"
    documents: tuple[int, ...] = ()
    layers: int = 1

    @property
    def group(self) -> str:
        """What a geometric mean is taken over: `d64 causal`."""
        return f"{self._width} {self.mask}"

    @property
    def _width(self) -> str:
        tail = f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else ""
        return f"d{self.head_dim}{tail}"

    @property
    def size(self) -> str:
        """Batch and length: `16x1024`, `64 documents`, `2x512/1024`."""
        if self.documents:
            equal = "equal " if len(set(self.documents)) == 1 else ""
            return f"{len(self.documents)} {equal}documents"
        tail = f"/{self.seqlen_k}" if self.seqlen_k != self.seqlen_q else ""
        return f"{self.batch}x{self.seqlen_q}{tail}"

    @property
    def name(self) -> str:
        """A name that says everything: `bf16 d64 causal 16x1024 h32/32`."""
        heads = f"h{self.num_heads_q}/{self.num_heads_kv}"
        layers = f" {self.layers} layers" if self.layers > 1 else ""
        return f"{self.dtype} {self.group} {self.size} {heads}{layers}"

    def to_json(self) -> dict[str, Any]:
        """Return the problem as plain data."""
        return {"name": self.name, **asdict(self), "mask": str(self.mask)}


def square(  # noqa: PLR0913, PLR0917 - a row of a table
    batch: int,
    seqlen: int,
    heads: tuple[int, int],
    head_dim: int,
    mask: Mask,
    dtype: str = "bf16",
    layers: int = 1,
) -> Shape:
    """Return a problem with as many keys as queries; heads are (num_heads_q, num_heads_kv)."""
    sizes = (batch, seqlen, seqlen, *heads, head_dim, head_dim)
    return Shape(*sizes, mask, dtype, layers=layers)


def paper_shapes() -> tuple[Shape, ...]:
    """Return 18 rows: head_dim 64, 128, 256, full and causal, seqlen 1k, 4k, 16k."""
    return tuple(
        square(_TOKENS // seqlen, seqlen, (_WIDTH // head_dim,) * 2, head_dim, mask)
        for head_dim in (64, 128, 256)
        for mask in (FULL, CAUSAL)
        for seqlen in (1024, 4096, 16384)
    )


def seed_shapes() -> tuple[Shape, ...]:
    """Return the block-causal shapes of robotics policies, and 18 layers of the first."""
    mask = Mask("block-causal", (_BLOCKS,))
    return (
        square(2, 1024, (8, 1), 256, mask),
        square(2, 4096, (8, 1), 256, mask),
        square(1, 16384, (8, 1), 256, mask),
        square(4, 4096, (32, 8), 128, mask),
        square(2, 1024, (8, 1), 256, mask, layers=_LAYERS),
    )


def document_lengths() -> tuple[int, ...]:
    """Return 64 lengths of 100 to 4000 tokens, the same on every machine; 64 divides the sum."""
    generator = random.Random(_DOCUMENT_SEED)  # noqa: S311 - no secret
    low, high = _DOCUMENT_LENGTHS
    lengths = [generator.randint(low, high) for _ in range(_DOCUMENTS)]
    missing = -sum(lengths) % _DOCUMENTS
    lengths[lengths.index(min(lengths))] += missing
    return tuple(lengths)


def varlen_shapes() -> tuple[Shape, ...]:
    """Return packed documents of unequal and, with the same total, of equal lengths."""
    unequal = document_lengths()
    equal = (sum(unequal) // len(unequal),) * len(unequal)
    return tuple(
        Shape(1, sum(lengths), sum(lengths), 16, 16, 128, 128, mask, documents=lengths)
        for mask in (FULL, CAUSAL)
        for lengths in (unequal, equal)
    )


def fp32_shapes() -> tuple[Shape, ...]:
    """Return float32 problems: head_dim 64, 128, 256, full and causal."""
    return tuple(
        square(2, 2048, (_WIDTH // head_dim,) * 2, head_dim, mask, "fp32")
        for head_dim in (64, 128, 256)
        for mask in (FULL, CAUSAL)
    )


def visible_pairs(shape: Shape) -> int:
    """Return the number of (query, key) pairs that the mask leaves, over batch and heads."""
    documents = [(length, length) for length in shape.documents]
    lengths = documents or [(shape.seqlen_q, shape.seqlen_k)]
    pairs = sum(_pairs(shape.mask, *one) for one in lengths)
    return shape.batch * shape.num_heads_q * pairs


@lru_cache(maxsize=1024)
def _pairs(mask: Mask, seqlen_q: int, seqlen_k: int) -> int:
    return sum(high - low for low, high in mask.intervals(seqlen_q, seqlen_k))


def count_flops(shape: Shape, phase: str) -> float:
    """Return 2 * (head_dim + head_dim_v) per visible pair forward, 2.5 times that backward."""
    return 2.0 * (shape.head_dim + shape.head_dim_v) * visible_pairs(shape) * PASSES[phase]
