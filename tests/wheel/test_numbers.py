"""Numbers of every kind as arguments: accepted, or refused in a sentence."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
import torch

import flash_dist
from flash_dist import BlockMask, IntervalMask
from flash_dist.compat.flash_attn.bert_padding import index_put_first_axis, pad_input

if TYPE_CHECKING:
    from collections.abc import Callable

SEQLENS: Final = torch.tensor([0, 3, 8], dtype=torch.int32)
TABLE: Final = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
FUNCTIONS: Any = flash_dist  # the wrong types are intended
HUGE: Final = 10**5000  # beyond floats, and too long for Python to print


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def attend(**changes: Any) -> object:  # noqa: ANN401
    return FUNCTIONS.flash_attn_func(*(draw(2, 8, 2, 16) for _ in "qkv"), **changes)


def attend_packed(**changes: Any) -> object:  # noqa: ANN401
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 5, **changes}
    tensors = (draw(8, 2, 16) for _ in "qkv")
    return FUNCTIONS.flash_attn_varlen_func(*tensors, SEQLENS, SEQLENS, **longest)


def attend_one_packed(**changes: Any) -> object:  # noqa: ANN401
    numbers = {"max_seqlen": 5, **changes}
    return FUNCTIONS.flash_attn_varlen_qkvpacked_func(draw(8, 3, 2, 16), SEQLENS, **numbers)


def decode(**changes: Any) -> object:  # noqa: ANN401
    caches = (draw(2, 32, 2, 16) for _ in "kv")
    return FUNCTIONS.flash_attn_with_kvcache(draw(2, 1, 4, 16), *caches, **changes)


def decode_latent(**changes: Any) -> object:  # noqa: ANN401
    numbers = {"cache_seqlens": 20, "head_dim_v": 32, **changes}
    return FUNCTIONS.flash_mla_with_kvcache(draw(2, 1, 4, 40), draw(4, 16, 1, 40), TABLE, **numbers)


def attend_flex(**changes: Any) -> object:  # noqa: ANN401
    return FUNCTIONS.flex_attention(*(draw(2, 2, 8, 16) for _ in "qkv"), **changes)


def attend_as_torch(**changes: Any) -> object:  # noqa: ANN401
    tensors = (draw(2, 2, 8, 16) for _ in "qkv")
    return FUNCTIONS.scaled_dot_product_attention(*tensors, **changes)


def put(**changes: Any) -> object:  # noqa: ANN401
    return index_put_first_axis(draw(4, 3), torch.arange(4), **{"first_axis_dim": 4, **changes})


def pad(**changes: Any) -> object:  # noqa: ANN401
    return pad_input(draw(4, 3), torch.arange(4), **{"batch": 2, "seqlen": 4, **changes})


def tiles(**changes: Any) -> object:  # noqa: ANN401
    return BlockMask.from_tiles(torch.ones(2, 2).bool(), **changes)


def intervals(**changes: Any) -> object:  # noqa: ANN401
    return BlockMask.from_intervals([0, 1], [1, 2], **changes)


def interval_mask(**changes: Any) -> object:  # noqa: ANN401
    return IntervalMask.of(torch.zeros(4).int(), torch.ones(4).int(), **{"seqlen_k": 8, **changes})


def window(**changes: Any) -> object:  # noqa: ANN401
    return BlockMask.sliding_window(**{"left": 1, "right": 1, **changes})


def padding(**changes: Any) -> object:  # noqa: ANN401
    return BlockMask.padding(**{"lengths": [1, 2], **changes})


def plan(**changes: Any) -> object:  # noqa: ANN401
    sizes = {"batch": 2, "num_heads_q": 2, "seqlen_q": 8, "seqlen_k": 8, **changes}
    return BlockMask.causal().plan(**sizes)


PLACES: Final[dict[Callable[..., object], tuple[str, ...]]] = {
    attend: ("dropout_p", "softmax_scale", "softcap", "window_size", "alibi_slopes", "num_splits"),
    attend_packed: ("max_seqlen_q", "max_seqlen_k", "softmax_scale", "window_size", "seqused_k"),
    attend_one_packed: ("max_seqlen", "softmax_scale"),
    decode: ("cache_seqlens", "softmax_scale", "softcap", "window_size", "num_splits"),
    decode_latent: ("cache_seqlens", "softmax_scale", "head_dim_v", "is_fp8_kvcache", "indices"),
    attend_flex: ("scale", "score_mod"),
    attend_as_torch: ("scale", "dropout_p"),
    put: ("first_axis_dim",),
    pad: ("batch", "seqlen"),
    tiles: ("block_size", "seqlen_q", "seqlen_k"),
    intervals: ("seqlen_k",),
    interval_mask: ("seqlen_k",),
    window: ("left", "right", "alignment"),
    plan: ("batch", "num_heads_q", "seqlen_q", "seqlen_k"),
    padding: ("lengths", "side"),
    BlockMask.prefix: ("lengths",),
    BlockMask.documents: ("q_ids",),
}
NUMBERS: Final = {
    "digits": HUGE,
    "negative digits": -HUGE,
    "fraction of digits": Fraction(HUGE, 3),
    "least fraction": Fraction(1, HUGE),
    "digits in a tuple": (HUGE, -HUGE),
    "64 bits": 2**64,
    "infinity": float("inf"),
    "no number": float("nan"),
    "fraction": Fraction(1, 4),
    "decimal": Decimal("0.25"),
    "signalling decimal": Decimal("sNaN"),
    "numpy": np.float32(0.25),
    "numpy's integer": np.uint64(2**64 - 1),
    "long double": np.longdouble(0.25),
    "array": np.array([4]),
    "bool": True,
    "complex": 1j,
    "text": "4",
    "tensor": torch.tensor(0.25),
    "integer in a tensor": torch.tensor(4),
    "tensor without values": torch.tensor(4, device="meta"),
    "two without values": torch.zeros(2, dtype=torch.int32, device="meta"),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, names in PLACES.items() for name in names]
)
def test_a_number_is_taken_or_refused_in_a_sentence(
    call: Callable[..., object], name: str, number: object
) -> None:
    try:
        call(**{name: number})
    except (TypeError, ValueError) as error:
        sentence = str(error).partition("\n\nhint: ")[0]
        assert ", got " in sentence
        assert "\n" not in sentence
        assert name in sentence or name == "block_size"


@pytest.mark.parametrize("scale", [Fraction(1, 4), np.float32(0.25), np.longdouble(0.25)], ids=repr)
def test_a_scale_of_another_kind_is_that_of_a_float(scale: float) -> None:
    assert torch.equal(attend(softmax_scale=scale), attend(softmax_scale=0.25))  # type: ignore[arg-type]
    assert torch.equal(attend(softcap=scale), attend(softcap=0.25))  # type: ignore[arg-type]
