"""Errors for requests that no kernel supports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from ...kernels.choices import find_match_kvcache
from ...masks.registry import is_traced
from ...toolkit.errors import hint_to_build

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_SERVES: Final = '`attn_implementation="eager"` serves it'
_EAGER: Final = f"hint: {_SERVES}"

_BATCHING: Final = hint_to_build(
    'hint: `attn_implementation="flash_attention_2"` serves continuous batching by these kernels, '
    "with a folder that `nox -s hub` makes in LOCAL_KERNELS",
    'hint: `attn_implementation="sdpa"` serves continuous batching',
)

UNTRACEABLE: Final = (
    "a mask in a graph of torch.compile must be a band within sequences, which lie without gaps, "
    'got one that shows other pairs\n\nhint: `attn_implementation="sdpa"` compiles it'
)

# Names that model configurations give to the dropout of attention weights.
_DROPOUTS: Final = (
    "attention_dropout",
    "attention_probs_dropout_prob",
    "attn_pdrop",
    "attention_dropout_prob",
    "attn_dropout",
    "dropout_rate",
    "dropout",
)

# Some models put the selected keys into the mask for eager and sdpa, but pass indices of these keys
# to other attention functions.
_PICKED: Final = "no kernels for selected keys"
_UNSUPPORTED: Final = {  # by argument: what a module asks for, what is missing, a hint
    "indices": ("indices", _PICKED, _EAGER),
    "block_indices": ("block_indices", _PICKED, _EAGER),
    "sinks": ("sinks", "no sinks of single queries", _EAGER),
    "head_mask": ("head_mask", "no kernels that weigh heads", _EAGER),
    "output_attentions": ("output_attentions=True", "no weights that were stored", _EAGER),
    "cache": ("a paged cache", "no pages under this name", _BATCHING),
}


def refuse_match(what: str) -> None:
    """Raise ValueError if match_kvcache is on, because `what` cannot return the bits of a cache."""
    if find_match_kvcache():
        message = f"match_kvcache must be False for {what}, got True"
        raise ValueError(message)


def refuse_dropout(module: torch.nn.Module, dropout: float) -> None:
    """Raise ValueError if dropout is not 0, for a single query that reads a cache in `generate`."""
    if dropout:
        what = f"dropout={dropout} in `generate`"
        _refuse(module, what, "no kernels of one query with it", _advise(module, dropout))


def require_supported(module: torch.nn.Module, arguments: Mapping[str, object]) -> None:
    """Raise ValueError for the first unsupported argument."""
    for name, words in _UNSUPPORTED.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            _refuse(module, *words)


def require_numbers(device: torch.device | str) -> None:
    """Raise ValueError for a model on the meta device, from which no mask can be read."""
    if str(device) == "meta":
        message = (
            "a model must be on a CUDA device or the CPU, got device meta"
            '\n\nhint: `attn_implementation="sdpa"` runs there'
        )
        raise ValueError(message)


def refuse_dtype(module: torch.nn.Module, dtype: torch.dtype) -> NoReturn:
    """Raise TypeError for a mask of integers, which libraries interpret differently."""
    message = (
        f"the attention_mask of {type(module).__name__} must be of booleans or of numbers that are "
        f"added to scores, got {str(dtype).removeprefix('torch.')}\n\n"
        "hint: `attention_mask.bool()` shows the keys where it is not 0"
    )
    raise TypeError(message)


def refuse_shape(
    module: torch.nn.Module, name: str, got: torch.Size, wanted: tuple[int, int, int, int]
) -> NoReturn:
    """Raise ValueError for a mask or bias that was made for scores of another shape."""
    message = (
        f"the {name} of {type(module).__name__} must broadcast to [batch, num_heads_q, "
        f"seqlen_q, seqlen_k], {list(wanted)}, and show no key behind these, got shape {list(got)}"
        f"\n\nhint: the cache of a layer with a window has the last {wanted[3]} keys alone, "
        "for which the mask must be"
    )
    raise ValueError(message)


def refuse_packed_bias() -> NoReturn:
    """Raise ValueError for a bias with packed sequences."""
    message = (
        "position_bias and an attention_mask that is added must be None with cu_seq_lens_q, got a "
        "tensor: its numbers are those of places in the row, and packed sequences read those of "
        f"places in the sequence\n\n{_EAGER}"
    )
    raise ValueError(message)


def refuse_sizes(module: torch.nn.Module, made: tuple[int, int], got: tuple[int, int]) -> NoReturn:
    """Raise ValueError if the mask was made for other numbers of queries or keys."""
    message = (
        f"{type(module).__name__} gives {got[0]} queries and {got[1]} keys, and its attention_mask "
        f"was made for {made[0]} and {made[1]}\n\n{_EAGER}"
    )
    raise ValueError(message)


def refuse_tracing() -> NoReturn:
    """Raise ValueError for a mask that graphs do not support; torch.compile shows the message."""
    raise ValueError(UNTRACEABLE)


def refuse_constant(name: str) -> None:
    """Raise ValueError if torch.jit.trace would store the values of a tensor for all calls."""
    if is_traced():
        message = (
            f"torch.jit.trace must be given no {name}, got one: its values are read now, and the "
            "trace would keep them for other inputs\n\n"
            "hint: `torch.export` and `torch.compile` take it"
        )
        raise ValueError(message)


def _refuse(module: torch.nn.Module, what: str, why: str, hint: str) -> NoReturn:
    message = f"{type(module).__name__} asks for {what}, and there are {why}\n\n{hint}"
    raise ValueError(message)


def _advise(module: torch.nn.Module, dropout: float) -> str:
    """Return a hint with the option of the model's configuration that turns dropout off."""
    config: Any = getattr(module, "config", None)
    names = (name for name in _DROPOUTS if getattr(config, name, None) == dropout)
    name = next(names, _DROPOUTS[0])
    return f"hint: make the model with `{name}=0.0` in its configuration, or call `model.eval()`"
