"""Taking the padding out of a batch and putting it back, as flash_attn.bert_padding does.

Plain torch: differentiable as often as wanted, the same bits on every run, on any device.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from .absent import refuse

Tensor = torch.Tensor

__all__ = [
    "index_first_axis",
    "index_first_axis_residual",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def __getattr__(name: str) -> object:
    raise refuse(__name__, name, __all__)


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:  # noqa: A002 - flash-attention's name
    """Return the rows `input[indices]`; gradients of a row that is taken twice are added."""
    return input[indices]


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Return `index_first_axis(input, indices)`, and input for what is added to it later."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros of [first_axis_dim, ...] with `values` at rows `indices`, each there once."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Take the tokens that a mask names, one sequence after the other. Waits for the GPU.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], bool or integers: 1 is a token, 0 is padding.
        unused_mask: Likewise: 1 is a place that is taken and not used.

    Returns:
        hidden_states: [total, ...], the tokens of both masks.
        indices: [total], where each token was in [batch * seqlen]; for `pad_input`.
        cu_seqlens: [batch + 1], int32: where each sequence begins in them.
        max_seqlen: Tokens of the longest sequence.
        seqused: [batch], int32: how many tokens of each sequence attention_mask names.

    Raises:
        ValueError: A mask has not the shape [batch, seqlen] of hidden_states.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    taken = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        taken = attention_mask + unused_mask
    seqlens = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulate(seqlens), _find_longest(seqlens), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Take the tokens of rows that hold several sequences each. Waits for the GPU.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: [batch, seqlen], integers: the lengths of a row's sequences, which
            lie one after the other from its begin, in any places of the row; 0 elsewhere.

    Returns:
        hidden_states: [total, ...].
        indices: [total], where each token was in [batch * seqlen]; for `pad_input`.
        cu_seqlens: [sequences + 1], int32: where each sequence begins in them.
        max_seqlen: Tokens of the longest sequence.

    Raises:
        ValueError: attention_mask_in_length has not the shape [batch, seqlen] of hidden_states.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    places = torch.arange(lengths.shape[-1], device=lengths.device)
    taken = places < lengths.sum(-1, keepdim=True)
    indices = taken.flatten().nonzero().flatten()
    seqlens = lengths[lengths != 0]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulate(seqlens), _find_longest(seqlens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back to where `unpad_input` found them; padding is 0.

    Args:
        hidden_states: [total, ...].
        indices: [total], the place of each token in [batch * seqlen].
        batch: Sequences.
        seqlen: Places of a sequence.

    Returns:
        [batch, seqlen, ...].
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _cumulate(seqlens: Tensor) -> Tensor:
    return pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))


def _find_longest(seqlens: Tensor) -> int:
    return int(seqlens.max().item()) if seqlens.numel() else 0


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:  # noqa: PLR2004
        message = (
            f"{name} must have shape [batch, seqlen], {list(hidden_states.shape[:2])}, "
            f"got {list(mask.shape)}"
        )
        raise ValueError(message)
