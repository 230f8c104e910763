"""Checks the arguments of masks, and copies integers to the host."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Final, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..toolkit.errors import show

Tensor = torch.Tensor
Integers = Tensor | Sequence[int] | Sequence[Sequence[int]]
Error = TypeVar("Error", ValueError, TypeError)

MAX_SEQLEN: Final = 2**30 - 1

# Allowed shapes of arguments, as text.
LENGTHS: Final = ("[batch]",)
IDS_Q: Final = ("[seqlen_q]", "[batch, seqlen_q]")
IDS_K: Final = ("[seqlen_k]", "[batch, seqlen_k]")
INTERVALS: Final = ("[seqlen_q]", "[batch, seqlen_q]", "[batch, num_heads_q, seqlen_q]")
PAIRS: Final = ("[seqlen_q, seqlen_k]", "[batch or 1, num_heads_q or 1, seqlen_q, seqlen_k]")
TILES: Final = ("[rows, columns]", "[batch or 1, num_heads_q or 1, rows, columns]")


class Shape(NamedTuple):
    """The sizes of a call of attention."""

    batch: int
    num_heads_q: int
    seqlen_q: int
    seqlen_k: int


class Sizes(NamedTuple):
    """The sizes that a mask was made for.

    None fits any size. For batch and num_heads_q, 1 also fits any size.
    """

    batch: int | None = None
    num_heads_q: int | None = None
    seqlen_q: int | None = None
    seqlen_k: int | None = None

    @classmethod
    def of(cls, shape: torch.Size, seqlen_k: int | None) -> Sizes:
        """Return the sizes of a tensor [batch, heads, seqlen_q, ...]."""
        return cls(shape[0], shape[1], shape[2], seqlen_k)

    def planes(self) -> tuple[int, int]:
        """Return the numbers of stored batch entries and heads; 1 if all have the same mask."""
        return self.batch or 1, self.num_heads_q or 1

    def join(self, other: Sizes) -> Sizes:
        """Return the sizes that fit both masks; raise ValueError if there are none."""
        return Sizes(
            *(
                _join(name, mine, theirs)
                for name, mine, theirs in zip(self._fields, self, other, strict=True)
            )
        )

    def require(self, shape: Shape) -> None:
        """Raise ValueError if a call does not fit these sizes."""
        for name, size, got in zip(self._fields, self, shape, strict=True):
            broadcasts = name in BROADCASTING and size == 1
            if size is not None and size != got and not broadcasts:
                message = f"{name} must be {size}, the size that the mask was made for, got {got}"
                raise complain(ValueError, message)


BROADCASTING: Final = ("batch", "num_heads_q")


def _join(name: str, mine: int | None, theirs: int | None) -> int | None:
    if mine is None or theirs is None or mine == theirs:
        return theirs if mine is None else mine
    if name in BROADCASTING and 1 in {mine, theirs}:
        return max(mine, theirs)
    raise complain(ValueError, f"masks combined with & must agree in {name}, got {mine} & {theirs}")


def parse_index(index: object, sizes: Sizes) -> tuple[slice, slice]:
    """Return the slices of batch entries and heads that an index selects.

    If an axis has size 1, any int or slice selects its only entry.

    Raises:
        TypeError: The index is not an int, a slice or a tuple of at most two of these.
        IndexError: An int is out of range.
        ValueError: A slice goes backwards, or is empty.
    """
    pair = index if isinstance(index, tuple) else (index,)
    if len(pair) > len(BROADCASTING):
        message = f"a BlockMask is indexed by batch and heads, got {len(pair)} indices"
        raise complain(TypeError, message)
    pair += (slice(None),) * (len(BROADCASTING) - len(pair))
    batch, heads = map(_parse_axis, BROADCASTING, pair, sizes.planes())
    return batch, heads


def _parse_axis(name: str, index: object, size: int) -> slice:
    if isinstance(index, Integral) and not isinstance(index, bool):
        number = int(index)
        if size > 1 and not -size <= number < size:
            message = f"an index of {name} must be from {-size} to {size - 1}, got {show(number)}"
            raise IndexError(message)
        first = number % size
        return slice(first, first + 1, 1)
    if not isinstance(index, slice):
        message = (
            f"a BlockMask is indexed by an int or a slice of {name}, got {type(index).__name__}"
        )
        raise complain(TypeError, message)
    if size == 1:
        return slice(0, 1, 1)
    found = slice(*index.indices(size))
    if found.step < 0 or not range(size)[found]:
        message = f"a slice of {name} must name some of its {size} entries, in order, got {index}"
        raise complain(ValueError, message)
    return found


def complain(kind: type[Error], message: str, hint: str | None = None) -> Error:
    """Return an error with one sentence and, if given, a hint on the next step."""
    return kind(message if hint is None else f"{message}\n\nhint: {hint}")


def parse_shape(batch: int, num_heads_q: int, seqlen_q: int, seqlen_k: int) -> Shape:
    """Return the checked sizes of a call."""
    sizes = batch, num_heads_q, seqlen_q, seqlen_k
    return Shape(*map(parse_size, Shape._fields, sizes))


def parse_size(name: str, size: int) -> int:
    """Return a size as an int, checked to be from 1 to MAX_SEQLEN."""
    if isinstance(size, bool) or not isinstance(size, Integral):  # numpy's integers are Integral
        raise complain(TypeError, f"{name} must be an int, got {type(size).__name__}")
    if not 1 <= size <= MAX_SEQLEN:
        raise complain(ValueError, f"{name} must be from 1 to {MAX_SEQLEN}, got {show(size)}")
    return int(size)


def parse_integers(name: str, values: Integers, dims: tuple[str, ...]) -> Tensor:
    """Return an int64 copy on the CPU, with as many axes as the longest of `dims`.

    Args:
        name: The name of the argument.
        values: Integers of any dtype, on any device.
        dims: The allowed shapes as text, such as "[batch, seqlen_q]".
    """
    tensor = require_dims(name, _as_tensor(name, values), dims)
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        raise complain(TypeError, f"{name} must be integers, got {tensor.dtype}")
    return tensor.detach().to("cpu", torch.int64, copy=True).contiguous()


def parse_bools(name: str, values: Tensor, dims: tuple[str, ...]) -> Tensor:
    """Return a view of the booleans with as many axes as the longest of `dims`."""
    tensor = _as_tensor(name, values)
    if tensor.dtype != torch.bool:
        hint = "a mask of numbers is a bias, which is not supported; `mask == 0` only hides keys"
        raise complain(
            TypeError,
            f"{name} must be torch.bool, got {tensor.dtype}",
            hint if tensor.dtype.is_floating_point else None,
        )
    return require_dims(name, tensor.detach(), dims)


def _as_tensor(name: str, values: object) -> Tensor:
    if isinstance(values, Tensor):
        return require_values(name, values)
    try:
        return torch.as_tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        message = f"{name} must be a torch.Tensor or a sequence of numbers, got {show(values)}"
        raise complain(TypeError, message) from error


def require_values(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, or raise ValueError if it is not dense or is a meta or fake tensor."""
    require_dense(name, tensor)
    if tensor.is_meta or isinstance(tensor, FakeTensor):
        kind = "one on the meta device" if tensor.is_meta else "a FakeTensor"
        raise complain(ValueError, f"{name} must be a tensor with values, got {kind}")
    return tensor


def require_dense(name: str, tensor: Tensor) -> None:
    """Raise ValueError for a nested or sparse tensor."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise complain(ValueError, f"{name} must be a dense tensor, got {kind}")


def require_dims(name: str, tensor: Tensor, dims: tuple[str, ...]) -> Tensor:
    """Return a view with leading axes of 1 added, up to the longest of `dims`.

    Raises:
        ValueError: No shape of `dims` has this number of axes, or the tensor is empty.
    """
    counts = [text.count(",") + 1 for text in dims]
    if tensor.dim() not in counts:
        raise complain(
            ValueError, f"{name} must have shape {' or '.join(dims)}, got {list(tensor.shape)}"
        )
    if tensor.numel() == 0:
        raise complain(
            ValueError, f"no dimension of {name} may be 0, got shape {list(tensor.shape)}"
        )
    return tensor[(None,) * (max(counts) - tensor.dim())]


def require_not_negative(name: str, values: Tensor) -> None:
    """Raise ValueError if a value is less than 0."""
    if int(values.min()) < 0:
        raise complain(ValueError, f"{name} must be at least 0, got {int(values.min())}")


def require_most(name: str, values: Tensor, most: int) -> None:
    """Raise ValueError if a value exceeds `most`, the number of keys of a call."""
    if int(values.max()) > most:
        raise complain(
            ValueError, f"{name} must be at most seqlen_k = {most}, got {int(values.max())}"
        )


def require_bool(name: str, value: object) -> None:
    """Raise TypeError unless a value is a Python, NumPy or symbolic bool. Integers are refused."""
    if value is True or value is False:
        return
    if not isinstance(value, torch.SymBool) and not _is_numpy_bool(value):
        message = f"{name} must be True or False, got {type(value).__name__}"
        if isinstance(value, Tensor) and name.endswith("causal"):
            message += "\n\nhint: `BlockMask` is for what differs in a batch"
        raise TypeError(message)


def require_bools(**values: object) -> None:
    """Raise TypeError for the first of several values that is not a bool."""
    for name, value in values.items():
        require_bool(name, value)


def _is_numpy_bool(value: object) -> bool:
    kind = type(value)
    return kind.__module__ == "numpy" and kind.__name__ in {"bool", "bool_"}


# --- Arguments of mask constructors, each with its own checks -------------------------------------


def parse_lengths(lengths: Integers) -> Tensor:
    """Return lengths [batch], checked to be at least 0."""
    parsed = parse_integers("lengths", lengths, LENGTHS)
    require_not_negative("lengths", parsed)
    return parsed


def parse_ids(name: str, q_ids: Integers, k_ids: Integers | None) -> tuple[Tensor, Tensor]:
    """Return q_ids [batch or 1, seqlen_q] and k_ids [batch or 1, seqlen_k], by default q_ids."""
    queries = parse_integers(f"q_{name}", q_ids, IDS_Q)
    if k_ids is None:
        return queries, queries
    keys = parse_integers(f"k_{name}", k_ids, IDS_K)
    if 1 not in {len(queries), len(keys)} and len(queries) != len(keys):
        message = (
            f"q_{name} and k_{name} must have the same batch, got {len(queries)} and {len(keys)}"
        )
        raise complain(ValueError, message)
    return queries, keys


def parse_interval(name: str, bound: Integers) -> Tensor:
    """Return lo or hi as [batch or 1, heads or 1, seqlen_q]."""
    parsed = parse_integers(name, bound, INTERVALS)
    has_batch_only = _as_tensor(name, bound).dim() == 2  # noqa: PLR2004
    return parsed.transpose(0, 1) if has_batch_only else parsed


def broadcast_bounds(
    lo: Tensor, hi: Tensor, given: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Return lo and hi, broadcast against each other.

    Args:
        lo: First key of each query.
        hi: End of the keys of each query.
        given: The caller's lo and hi, whose shapes an error shows. Defaults to lo and hi.

    Raises:
        ValueError: The shapes do not broadcast.
    """
    try:
        lows, highs = torch.broadcast_tensors(lo, hi)
    except RuntimeError as error:
        shapes = " and ".join(str(list(x.shape)) for x in given or (lo, hi))
        message = f"lo and hi must have shapes that broadcast against each other, got {shapes}"
        raise complain(ValueError, message) from error
    return lows, highs


def parse_block_size(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Return block_q and block_k; a single int is used for both."""
    pair = (block_size, block_size) if isinstance(block_size, Integral) else block_size
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004
        message = f"block_size must be an int or (block_q, block_k), got {show(block_size)}"
        raise complain(ValueError, message)
    return parse_size("block_size", pair[0]), parse_size("block_size", pair[1])


def blocked_seqlen(name: str, seqlen: int | None, blocks: int, block: int) -> int:
    """Check that `seqlen` tokens fill this number of blocks, and return it.

    The last block may be partial. If `seqlen` is None, return the length with full blocks.
    """
    if seqlen is None:
        return blocks * block
    seqlen = parse_size(name, seqlen)
    if -(-seqlen // block) != blocks:
        raise complain(
            ValueError,
            f"{name} must be from {(blocks - 1) * block + 1} to {blocks * block} for {blocks} "
            f"blocks of {block}, got {show(seqlen)}",
        )
    return seqlen
