"""Problems to measure, their masks and amount of work; needs no torch.

Only visible (query, key) pairs count as work.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from ...toolkit.errors import UsageError
from ...toolkit.targets.wording import read_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MASKS: Final = (
    "full",
    "causal",
    "window:LEFT,RIGHT",
    "block-causal:BLOCKS",
    "prefix:LENGTH",
    "random:PERCENT",
)
DTYPES: Final = ("bf16", "fp16", "fp32")
SETS: Final = (
    "paper", "long", "corners", "seed", "varlen", "fp32", "scores", "features", "decode",
    "overhead", "mine",
)  # fmt: skip
SCORES: Final = ("", "softcap", "alibi", "sinks")
FEATURES: Final = ("bias", "dropout")

_NUMBERS: Final = {
    "full": 0,
    "causal": 0,
    "window": 2,
    "block-causal": 1,
    "prefix": 1,
    "random": 1,
}
_ALL: Final = 100  # percent of the keys

BACKWARD: Final = 2.5  # FLOPs of backward over forward: five matrix products instead of two

# FLOPs of each pass, relative to the forward. The second forward of a checkpoint does not count.
FACTORS: Final = {
    "forward": 1.0,
    "backward": BACKWARD,
    "both": 1 + BACKWARD,
    "checkpointed": 1 + BACKWARD,
}


@dataclass(frozen=True)
class Mask:
    """A mask, written and parsed as text such as `window:128,0`.

    Each query attends to one interval of keys, except with a random mask: with `random:50`, each
    query attends to its own random half of the keys.
    """

    kind: str
    numbers: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Mask:
        """Parse a mask from the command line, such as `window:128,0`."""
        kind, _, rest = text.partition(":")
        parts = rest.split(",") if rest else []
        known = kind in _NUMBERS and len(parts) == _NUMBERS[kind]
        numbers = tuple(n for part in parts if (n := read_whole(part)) is not None)
        if not known or len(numbers) < len(parts):
            message = f"mask must be one of {', '.join(MASKS)}, got `{text:.60}`"
            raise UsageError(message, hint="`--mask block-causal:16` has 16 blocks of equal length")
        if kind == "block-causal" and numbers[0] == 0:
            message = f"block-causal needs at least 1 block, got `{text:.60}`"
            raise UsageError(message)
        if kind == "random" and not 0 < numbers[0] <= _ALL:
            message = f"random needs 1 to {_ALL} percent of the keys, got `{text:.60}`"
            raise UsageError(message)
        return cls(kind, numbers)

    def __str__(self) -> str:
        numbers = ",".join(map(str, self.numbers))
        return f"{self.kind}:{numbers}" if numbers else self.kind

    def intervals(self, seqlen_q: int, seqlen_k: int) -> Iterator[tuple[int, int]]:
        """Yield each query's first visible key and the key after its last visible key.

        Causal, window and prefix masks are aligned to the bottom right. A query without visible
        keys has (0, 0).

        Raises:
            ValueError: The mask is random.
        """
        if self.kind == "random":
            message = f"a mask of kind random has no intervals, got {self}"
            raise ValueError(message)
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

    def count_pairs(self, seqlen_q: int, seqlen_k: int) -> int:
        """Return the number of visible (query, key) pairs."""
        if self.kind == "random":
            return seqlen_q * self.count_random(seqlen_k)
        return sum(high - low for low, high in self.intervals(seqlen_q, seqlen_k))

    def count_random(self, seqlen_k: int) -> int:
        """Return the number of visible keys of each query of a random mask, at least one."""
        return max(1, seqlen_k * self.numbers[0] // _ALL)


FULL: Final = Mask("full")
CAUSAL: Final = Mask("causal")


@dataclass(frozen=True)
class Shape:
    """One problem.

    documents: Lengths of packed documents; empty for a problem that is not packed.
    layers: Number of attention layers in a stack.
    cached: k and v are a KV cache, so there is only a forward; v may be a part of k (MLA).
    scores: A score modification, one of SCORES or FEATURES.
    """

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
    cached: bool = False
    scores: str = ""

    @property
    def latent(self) -> bool:
        """True if the values are the first columns of the cached keys (MLA)."""
        return self.cached and self.head_dim_v != self.head_dim

    @property
    def group(self) -> str:
        """Group of shapes averaged together: `d64 causal`, `d64 full alibi`, `d64 cache`."""
        return f"{self._width} {'cache' if self.cached else self.pattern}"

    @property
    def pattern(self) -> str:
        """The mask and the score modification: `causal`, `full alibi`."""
        return f"{self.mask} {self.scores}".rstrip()

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
        """A unique name: `bf16 d64 causal 16x1024 h32/32`."""
        heads = f"h{self.num_heads_q}/{self.num_heads_kv}"
        layers = f" {self.layers} layers" if self.layers > 1 else ""
        return f"{self.dtype} {self.group} {self.size} {heads}{layers}"

    def to_json(self) -> dict[str, Any]:
        """Return the problem as plain data."""
        return {"name": self.name, **asdict(self), "mask": str(self.mask)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Shape:
        """Read the problem that `to_json` wrote."""
        fields = {**data, "mask": Mask.parse(data["mask"]), "documents": tuple(data["documents"])}
        del fields["name"]
        return cls(**fields)


def square(batch: int, seqlen: int, heads: tuple[int, int], head_dim: int, mask: Mask) -> Shape:
    """Return a problem with as many keys as queries; heads: (num_heads_q, num_heads_kv)."""
    return Shape(batch, seqlen, seqlen, *heads, head_dim, head_dim, mask)


def visible_pairs(shape: Shape) -> int:
    """Return the number of visible (query, key) pairs, over batch and heads."""
    documents = [(length, length) for length in shape.documents]
    lengths = documents or [(shape.seqlen_q, shape.seqlen_k)]
    pairs = sum(_pairs(shape.mask, *one) for one in lengths)
    return shape.batch * shape.num_heads_q * pairs


@lru_cache(maxsize=1024)
def _pairs(mask: Mask, seqlen_q: int, seqlen_k: int) -> int:
    return mask.count_pairs(seqlen_q, seqlen_k)


def count_flops(shape: Shape, pass_: str) -> float:
    """Return the FLOPs of a pass: 2 * (head_dim + head_dim_v) * FACTORS[pass_] per visible pair."""
    return 2.0 * (shape.head_dim + shape.head_dim_v) * visible_pairs(shape) * FACTORS[pass_]
