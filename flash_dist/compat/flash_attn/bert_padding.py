"""Remove the padding of a batch and restore it, like flash_attn.bert_padding.

Plain torch: differentiable any number of times, deterministic, on any device.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ...attention.arguments import require_tensor, require_whole
from ...attention.layouts import dtype_name
from ...masks.plan import MAX_INDEX
from ...toolkit.errors import show
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
    """Return the rows `input[indices]`; gradients of repeated rows are added.

    Raises:
        TypeError: An argument is not a tensor, or indices are not integers.
        ValueError: indices does not have shape [total], or an index is out of range (checked on the
            CPU only).
    """
    _require_rows("input", input)
    _check_indices(indices)
    try:
        return input[indices]
    except IndexError as error:
        raise _refuse_index(indices, input.shape[0]) from error


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    """Return `index_first_axis(input, indices)`, and input for the caller's residual connection."""
    return index_first_axis(input, indices), input


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Return zeros of shape [first_axis_dim, ...] with `values` in the rows `indices`.

    The indices must be distinct.

    Raises:
        TypeError: An argument is not a tensor, indices are not integers, or first_axis_dim is not
            an integer.
        ValueError: indices and values differ in length, an index is out of range (checked on the
            CPU only), or the result would have more than 2**31 - 1 rows.
    """
    _require_rows("values", values)
    _check_indices(indices)
    if indices.shape[0] != values.shape[0]:
        message = (
            f"indices must have shape [total], [{values.shape[0]}], one for each row of values, "
            f"got {list(indices.shape)}"
        )
        raise ValueError(message)
    rows = _read_size("first_axis_dim", first_axis_dim)
    zeros = values.new_zeros((rows, *values.shape[1:]))
    try:
        return zeros.index_put((indices,), values)
    except IndexError as error:
        raise _refuse_index(indices, rows) from error


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Return the tokens that a mask marks, one sequence after the other. Waits for the GPU.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask: [batch, seqlen], bool or numbers: 0 is padding, anything else a token.
        unused_mask: [batch, seqlen]: not 0 for tokens that are allocated but not used. They are
            returned, too.

    Returns:
        hidden_states: [total, ...], the tokens of both masks.
        indices: [total], the position of each token in [batch * seqlen]; for `pad_input`.
        cu_seqlens: [batch + 1], int32: where each sequence begins in hidden_states.
        max_seqlen: Number of tokens of the longest sequence.
        seqused: [batch], int32: how many tokens of each sequence attention_mask marks.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: A mask does not have the shape [batch, seqlen] of hidden_states.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    used = attention_mask != 0
    taken = used
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        taken = used | (unused_mask != 0)
    seqlens = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    seqused = used.sum(-1, dtype=torch.int32)
    return tokens, indices, _cumulate(seqlens), _find_longest(seqlens), seqused


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return the tokens of rows that hold several sequences each. Waits for the GPU.

    Args:
        hidden_states: [batch, seqlen, ...].
        attention_mask_in_length: [batch, seqlen], integers: the lengths of a row's sequences, which
            follow each other from the start of the row. The lengths may be at any positions; all
            other elements are 0.

    Returns:
        hidden_states: [total, ...].
        indices: [total], the position of each token in [batch * seqlen]; for `pad_input`.
        cu_seqlens: [sequences + 1], int32: where each sequence begins in hidden_states.
        max_seqlen: Number of tokens of the longest sequence.

    Raises:
        TypeError: An argument is not a tensor.
        ValueError: attention_mask_in_length does not have the shape [batch, seqlen] of
            hidden_states, or a row's lengths add up to more than seqlen.
    """
    lengths = attention_mask_in_length
    _check_mask("attention_mask_in_length", lengths, hidden_states)
    places = torch.arange(lengths.shape[-1], device=lengths.device)
    sums = lengths.sum(-1, keepdim=True)
    longest = _find_longest(sums)
    if longest > lengths.shape[-1]:
        message = (
            "attention_mask_in_length must have lengths that are together at most seqlen, "
            f"{lengths.shape[-1]}, in each row, got {longest}"
        )
        raise ValueError(message)
    taken = places < sums
    indices = taken.flatten().nonzero().flatten()
    seqlens = lengths[lengths != 0]
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, _cumulate(seqlens), _find_longest(seqlens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back at the positions where `unpad_input` found them; padding becomes 0.

    Args:
        hidden_states: [total, ...].
        indices: [total], the position of each token in [batch * seqlen].
        batch: Number of sequences.
        seqlen: Positions per sequence.

    Returns:
        [batch, seqlen, ...].

    Raises:
        TypeError: As in `index_put_first_axis`.
        ValueError: Likewise.
    """
    _require_rows("hidden_states", hidden_states)
    batch, seqlen = _read_size("batch", batch), _read_size("seqlen", seqlen)
    rows = _read_size("batch * seqlen", batch * seqlen)
    padded = index_put_first_axis(hidden_states, indices, rows)
    return padded.view(batch, seqlen, *padded.shape[1:])


def _cumulate(seqlens: Tensor) -> Tensor:
    return pad(seqlens.cumsum(0, dtype=torch.int32), (1, 0))


def _find_longest(seqlens: Tensor) -> int:
    return int(seqlens.max().item()) if seqlens.numel() else 0


def _require_rows(name: str, x: Tensor) -> None:
    require_tensor(name, x)
    if x.dim() == 0:
        message = f"{name} must have rows, a first axis, got shape []"
        raise ValueError(message)


def _read_size(name: str, value: object) -> int:
    number = require_whole(name, value)
    if not 0 <= number <= MAX_INDEX:
        message = f"{name} must be from 0 to {MAX_INDEX}, got {show(number)}"
        raise ValueError(message)
    return number


def _check_indices(indices: Tensor) -> None:
    require_tensor("indices", indices)
    if indices.dtype not in {torch.int32, torch.int64}:
        message = (
            f"indices must be int32 or int64, got {dtype_name(indices.dtype)}"
            "\n\nhint: `unpad_input` returns them"
        )
        raise TypeError(message)
    if indices.dim() != 1:
        message = f"indices must have shape [total], got {list(indices.shape)}"
        raise ValueError(message)


def _refuse_index(indices: Tensor, rows: int) -> ValueError:
    """Return the error for an index that torch has rejected; torch checks only on the CPU."""
    least, most = (int(x) for x in indices.aminmax())
    wrong = most if most >= rows else least
    return ValueError(f"indices must be from 0 to {rows - 1}, the last row, got {wrong}")


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    require_tensor(name, mask)
    require_tensor("hidden_states", hidden_states)
    if mask.dim() != 2 or mask.shape != hidden_states.shape[:2]:  # noqa: PLR2004
        message = (
            f"{name} must have shape [batch, seqlen], {list(hidden_states.shape[:2])}, "
            f"got {list(mask.shape)}"
        )
        raise ValueError(message)
