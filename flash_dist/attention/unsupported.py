"""Unsupported arguments of flash-attention 2, 3 and 4 and of torch.

They are accepted if their values do not change the result.
"""

from __future__ import annotations

from difflib import get_close_matches
from inspect import signature
from numbers import Real
from typing import TYPE_CHECKING, Final, TypedDict

import torch

from ..toolkit.errors import show

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping


class Others(TypedDict, total=False):
    """Arguments of flash-attention 3 and 4, and of vLLM, that flash-attention 2 does not have."""

    attention_chunk: int
    aux_scalars: None
    aux_tensors: None
    block_sparse_tensors: None
    block_sparse_tensors_bwd: None
    disable_scheduler_metadata: bool
    gather_kv_indices: None
    k_descale: None
    learnable_sink: torch.Tensor | None
    mask_mod: None
    min_seqlen_k: None
    num_heads_q: None
    num_splits: int | None
    pack_gqa: bool | None
    page_table: None
    q_descale: None
    qv: None
    s_aux: torch.Tensor | None
    scheduler_metadata: None
    score_mod: None
    score_mod_bwd: None
    seqlen_k_per_split: None
    seqused_k: torch.Tensor | None
    seqused_q: None
    sm_margin: int
    v_descale: None


KNOWN: Final = frozenset(Others.__annotations__)

_MASKS: Final = (
    "`mask` takes a BlockMask\n\n"
    "hint: `BlockMask.from_flex` and `BlockMask.from_tiles` make one, once"
)
_SCALES: Final = "there are no kernels for 8-bit floats"
_SCHEDULE: Final = "calls are not scheduled in advance"
_SCORE_MOD: Final = (
    "the kernels are compiled before it is known\n\n"
    "hint: one that only hides scores is a mask, `BlockMask.from_dense`"
)
_SPLITS: Final = "keys are never split, which would change the order of summation"

REASONS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("aux_scalars", "aux_tensors", "score_mod", "score_mod_bwd"), _SCORE_MOD),
    **dict.fromkeys(("block_sparse_tensors", "block_sparse_tensors_bwd", "mask_mod"), _MASKS),
    **dict.fromkeys(("k_descale", "q_descale", "v_descale"), _SCALES),
    **dict.fromkeys(("num_splits", "seqlen_k_per_split"), _SPLITS),
    **dict.fromkeys(
        ("disable_scheduler_metadata", "min_seqlen_k", "scheduler_metadata"), _SCHEDULE
    ),
    "attention_chunk": (
        "it is a mask\n\n"
        "hint: `BlockMask.documents(positions // chunk) & BlockMask.causal()` is the mask of chunks"
    ),
    "gather_kv_indices": "there are no kernels that gather keys",
    "num_heads_q": (
        "queries, keys and values of one tensor have the same heads\n\n"
        "hint: `flash_attn_kvpacked_func` takes q separately"
    ),
    "pack_gqa": "kernels choose it, and no result depends on it",
    "page_table": (
        "it has another name here\n\n"
        "hint: `flash_attn_varlen_func` and `flash_attn_with_kvcache` take block_table"
    ),
    "qv": "there are no kernels with a second product of queries",
    "seqused_k": (
        "all keys of a batch entry are read\n\nhint: `flash_attn_with_kvcache` takes "
        "cache_seqlens, `flash_attn_varlen_func` seqused_k"
    ),
    "seqused_q": (
        "only cu_seqlens says which tokens are read\n\n"
        "hint: `BlockMask.padding(lengths)` is for `flash_attn_func`, with a batch axis"
    ),
    "sm_margin": "kernels use all multiprocessors",
}

_NONE: Final = (None,)
ALLOWED: Final[Mapping[str, tuple[object, ...]]] = {  # arguments not listed allow only None
    "attention_chunk": (0,),
    "disable_scheduler_metadata": (False, True),
    "num_splits": (None, 0, 1),
    "pack_gqa": (None, False, True),
    "sm_margin": (0,),
}


def are_defaults(dropout_p: object, softcap: object, alibi_slopes: object) -> bool:
    """Return whether these arguments have their defaults and need no further checks."""
    floats = type(dropout_p) is type(softcap) is float  # comparing a tensor would return a tensor
    return floats and dropout_p == softcap == 0.0 and alibi_slopes is None


def refuse_unsupported(**arguments: object) -> None:
    """Raise ValueError for the first argument whose value is not allowed; the message says why."""
    for name, value in arguments.items():
        values = ALLOWED.get(name, _NONE)
        plain = value is None or isinstance(value, (bool, int, float, Real))
        if plain and value in values:  # comparing a tensor would return a tensor
            continue
        *most, last = map(str, values)
        allowed = f"{', '.join(most)} or {last}" if most else last
        message = f"{name} must be {allowed}, got {describe(value)}: {REASONS[name]}"
        raise ValueError(message)


def check_others(function: Callable[..., object], others: Mapping[str, object]) -> None:
    """Refuse unknown names, and unsupported values of the arguments of flash-attention 3 and 4.

    Sinks are supported: `choose_scores` checks them.

    Args:
        function: The called function, used to suggest a name.
        others: Keyword arguments that are not parameters of the function.

    Raises:
        TypeError: A name is unknown.
        ValueError: A value is not supported.
    """
    require_known(function, others, KNOWN)
    refuse_unsupported(**{name: value for name, value in others.items() if name in REASONS})


def require_known(
    function: Callable[..., object], others: Iterable[str], known: Collection[str]
) -> None:
    """Raise TypeError for the first name in others that is not in known.

    Args:
        function: The called function, used to suggest a name.
        others: Names of arguments that are not parameters of the function.
        known: Names that the function accepts in addition to its parameters.
    """
    for name in others:
        if name not in known:
            message = f"{function.__name__}() got an unexpected keyword argument '{name}'"
            close = get_close_matches(name, (*signature(function).parameters, *sorted(known)), n=1)
            raise TypeError(f"{message}\n\nhint: did you mean `{close[0]}`?" if close else message)


def describe(value: object) -> str:
    """Describe the value of an unsupported argument."""
    return type(value).__name__ if isinstance(value, torch.Tensor) else show(value)
