"""The mask function: from what transformers says of a forward to what its layers are given.

For one query that is None or a tensor, int32 [batch, 1, 1, 2]: the first key that is seen and the
end. `generate` compiles such forwards, and a mask is an argument of them. For more queries it is
None or a `Sight`. None is a query that sees all keys, or as many queries as keys and what
`is_causal` says; with more keys, those behind the queries are empty slots of a static cache.

The padding of tokens is read here, once a forward, which waits for the GPU. So are the position in
a static cache, for more than one query, and documents, where transformers itself has found some.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.nn.functional import pad

from ...masks import BlockMask
from ...masks.band import Band
from .patterns import read_pattern
from .sight import Segments, Sight, send

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor

_CAUSAL: Final = Band(right=0)


class _Padding(NamedTuple):
    """Which keys exist, on the host."""

    exists: Tensor  # booleans [batch, seqlen_k]
    first: Tensor  # [batch]
    end: Tensor  # [batch]

    @classmethod
    def of(cls, exists: Tensor) -> _Padding:
        """Return it with where each row's keys begin and end."""
        keys = torch.arange(exists.shape[1], device="cpu")
        end = torch.where(exists, keys + 1, 0).amax(1)
        first = torch.where(exists, keys, exists.shape[1]).amin(1)
        return cls(exists, torch.minimum(first, end), end)

    @property
    def gaps(self) -> bool:
        """Whether there is padding between a row's keys."""
        return bool((self.exists.sum(1) != self.end - self.first).any())


def make_mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | Sight | None = None,
    **others: Any,  # noqa: ANN401 - of which only transformers' own functions read most
) -> Sight | Tensor | None:
    """Return what `attention_forward` is given as attention_mask.

    Args:
        batch_size: Sequences.
        kv_length: Keys, empty slots of a static cache included.
        kv_offset: Position of the first key.
        mask_function: Whether a query sees a key, as a function of their positions.
        attention_mask: Booleans [batch, positions], which tokens exist; or what was made before.
        others: Among them q_length, q_offset (a tensor with a static cache) and device; older
            transformers give cache_position for all three.
    """
    if isinstance(attention_mask, Sight):
        return attention_mask
    queries, position, device = _find_queries(**others)
    offset = position - kv_offset
    pattern = read_pattern(mask_function)
    padding = _read_padding(attention_mask, kv_offset, kv_length)
    if pattern is None or (padding is not None and (pattern.documents is not None or padding.gaps)):
        others |= {"batch_size": batch_size, "kv_length": kv_length, "kv_offset": kv_offset}
        return _see_any(queries, mask_function, attention_mask, others)
    if pattern.documents is not None:
        ids = pattern.documents.to("cpu").expand(batch_size, -1)  # waits
        return Sight(pattern.band, Segments(_changes(ids)), packed=True)
    if queries == 1:
        made = _see_once(pattern.band, padding, offset, kv_length, device)
        return None if made is None else made.expand(batch_size, 1, 1, 2).contiguous()
    return _see(pattern.band, padding, int(offset), queries, kv_length)  # waits for a tensor


def _find_queries(
    *,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    device: torch.device | str = "cpu",
    cache_position: Tensor | None = None,
    **_: object,
) -> tuple[int, int | Tensor, torch.device | str]:
    """Return how many queries there are, the position of the first, and their device."""
    if cache_position is not None:
        return len(cache_position), cache_position[0], cache_position.device
    return int(q_length or 0), q_offset, device


def _read_padding(attention_mask: Tensor | None, first: int, keys: int) -> _Padding | None:
    """Return which keys exist, None if all do of which there is a token."""
    if attention_mask is None:
        return None
    exists = attention_mask[:, first : first + keys].to("cpu", torch.bool)  # waits
    if bool(exists.all()):
        return None
    return _Padding.of(pad(exists, (0, keys - exists.shape[1])))


def _changes(ids: Tensor) -> Tensor:
    """Return where the id is another than before."""
    return pad(ids[:, 1:] != ids[:, :-1], (1, 0))


def _see_once(
    band: Band,
    padding: _Padding | None,
    offset: int | Tensor,
    keys: int,
    device: torch.device | str,
) -> Tensor | None:
    """Return the keys that one query sees [batch or 1, 1, 1, 2], None if they are all keys."""
    everything = torch.tensor([[0, keys]], device="cpu")
    bounds = everything
    if padding is not None:
        bounds = torch.stack([padding.first, padding.end], -1)
    lo, hi = (bounds if isinstance(offset, int) else send(bounds, device)).unbind(-1)
    if band.left >= 0:
        lo = torch.clamp(lo, min=offset - band.left)
    if band.right >= 0:
        hi = torch.clamp(hi, max=offset + band.right + 1)
    seen = torch.stack([lo, torch.maximum(lo, hi)], -1)
    if isinstance(offset, int):
        if bool((seen == everything).all()):
            return None
        seen = send(seen, device)
    return seen.to(torch.int32).view(-1, 1, 1, 2)


def _see(
    band: Band, padding: _Padding | None, offset: int, queries: int, keys: int
) -> Sight | None:
    """Return what queries from an offset on see of keys."""
    end = offset + queries
    exist = end if band.right == 0 and end < keys else None  # a static cache is empty behind that
    used = keys if exist is None else exist
    if padding is not None and bool(padding.exists[:, :used].all()):
        padding = None
    if padding is not None and used == queries and offset == 0:
        return Sight(band, Segments(_changes(padding.exists[:, :used])), keys=exist)
    aligned = used - queries == offset
    if padding is None and (aligned or band.is_full):
        plain = band.is_full or (band == _CAUSAL and offset == 0)
        return None if plain else Sight(band, keys=exist)
    rows = torch.arange(offset, end, device="cpu")
    first = torch.zeros(1, 1, dtype=torch.int64, device="cpu")
    last = torch.full((1, 1), used, device="cpu")
    if padding is not None:
        first, last = padding.first.unsqueeze(1), padding.end.unsqueeze(1)
    lo = first if band.left < 0 else torch.maximum(first, rows - band.left)
    hi = last if band.right < 0 else torch.minimum(last, rows + band.right + 1)
    lo, hi = (x.clamp(0, used).expand(-1, queries) for x in (lo, hi))
    return Sight(keys=exist, mask=BlockMask.from_intervals(lo, hi, seqlen_k=used))


def _see_any(
    queries: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    others: dict[str, Any],
) -> Sight | Tensor:
    """Return what transformers' own code finds, pair by pair."""
    seen = import_module("transformers.masking_utils").sdpa_mask(
        mask_function=mask_function,
        attention_mask=attention_mask,
        **{**others, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False},
    )
    return seen if queries == 1 else Sight(mask=BlockMask.from_dense(seen))
