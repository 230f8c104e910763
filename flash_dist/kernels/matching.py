"""Whether attention gives the bits of a KV cache, for a call, a block or a thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..masks import Band, BlockMask
from ..masks.inputs import complain, require_bool
from .choices import Choice, find_match_kvcache, process

if TYPE_CHECKING:
    from ..masks.intervals import IntervalMask


class match_kvcache(Choice):  # noqa: N801 - called as a function
    """Give out and lse the bits of `flash_attn_with_kvcache`, from here on or in a `with` block.

    Attention then sums in the order of the cache. A query has the same bits in training, in a
    prefill at once or in chunks, and in decoding, with or without pages, in any batch or packing.
    Gradients are those of this out and lse. Forward kernels take longer.

    It is for causal and full attention, windows, softcap, alibi_slopes and sinks, in float16 and
    bfloat16. float32 on a GPU and other masks raise an error. On the CPU, where it takes every
    dtype, the calls of the cache must be within the choice, too.

    A thread's choice is its own; threads that made none take what the main thread has chosen at the
    time. torch.compile makes the choice a part of the graph, and compiles again where it meets
    another. An argument `match_kvcache` goes before all of it.

    Args:
        match: False takes the faster order again.

    Raises:
        TypeError: match is no bool.
    """

    _name = "match_kvcache"

    def __init__(self, match: bool = True) -> None:  # noqa: FBT001, FBT002 - as torch.set_grad_enabled
        require_bool("match_kvcache", match)
        process.has_matched = True
        super().__init__(bool(match))


def is_matching(
    match: bool | None,  # noqa: FBT001
    q: torch.Tensor,
    mask: Band | BlockMask | IntervalMask,
) -> bool:
    """Return whether a call must have the bits of a cache.

    Args:
        match: The argument of the call; None: the choice of this thread.
        q: Queries.
        mask: Which keys each sees.

    Raises:
        TypeError: match is no bool, or no cache has the dtype.
        ValueError: No cache has the mask.
    """
    if match is None:
        match = find_match_kvcache()
    else:
        require_bool("match_kvcache", match)
    if not match:
        return False
    if q.dtype == torch.float32 and q.device.type == "cuda":
        raise complain(
            TypeError,
            "match_kvcache must be False for float32 on a GPU, got True",
            "caches are float16 or bfloat16 there",
        )
    if not isinstance(mask, Band) and (not isinstance(mask, BlockMask) or mask.band is None):
        raise complain(
            ValueError,
            f"match_kvcache must be False with this mask, got True and {mask!r}",
            "caches have causal and window_size; `match_kvcache=False` goes for one call",
        )
    return True
