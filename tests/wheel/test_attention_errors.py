"""Every function refuses invalid calls with a sentence."""

from __future__ import annotations

import re
import warnings
from inspect import signature
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex

from flash_dist import (
    BlockMask,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flex_attention,
    scaled_dot_product_attention,
)
from flash_dist.attention.arguments import choose_scale
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
Shapes = tuple[tuple[int, ...], ...]
Refusal = tuple[type[Exception], str]
Case = tuple["Callable[[], object]", Refusal]


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def same(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return draw(*shape), draw(*shape), draw(*shape)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return flash_attn_func(q, k, v)


SHAPES: dict[str, tuple[Shapes, str]] = {
    "head_dim": (
        ((1, 8, 2, 513),) * 3,
        r"head_dim must be at most 512, got 513 \(q has shape \[1, 8, 2, 513\]\)",
    ),
    "wide-v": (
        ((1, 8, 2, 64), (1, 8, 2, 64), (1, 8, 2, 128)),
        "head_dim_v must be at most head_dim, 64, got 128",
    ),
    "keys-head_dim": (
        ((1, 8, 2, 64), (1, 8, 2, 72), (1, 8, 2, 64)),
        "q and k must agree in head_dim, got 64 and 72",
    ),
    "dims": (
        ((8, 2, 64),) * 3,
        r"q must have 4 dimensions \[batch, seqlen, num_heads, head_dim\] or 5 \[.*\], got shape",
    ),
    "heads": (
        ((1, 8, 3, 64), (1, 8, 2, 64), (1, 8, 2, 64)),
        r"num_heads_kv must divide num_heads_q, got 2 \(k\) and 3 \(q\)",
    ),
    "more-kv-heads": (
        ((1, 8, 2, 64), (1, 8, 4, 64), (1, 8, 4, 64)),
        r"num_heads_kv must divide num_heads_q, got 4 \(k\) and 2 \(q\)",
    ),
    "grouped-heads": (
        ((1, 8, 4, 2, 64), (1, 8, 2, 64), (1, 8, 2, 64)),
        r"(?s)q and k must agree in num_heads_kv where q has .*hint: `q.transpose\(2, 3",
    ),
    "kv-heads": (
        ((1, 8, 4, 3, 64), (1, 8, 2, 64), (1, 8, 2, 64)),
        r"where q has heads_per_kv, got shapes \[1, 8, 4, 3, 64\] and \[1, 8, 2, 64\]$",
    ),
    "kv-shapes": (
        ((1, 8, 2, 64), (1, 8, 2, 64), (1, 9, 2, 64)),
        r"must have the same shape but for head_dim, got \[1, 8, 2, 64\] and \[1, 9, 2, 64\]",
    ),
    "batch": (
        ((1, 8, 2, 64), (2, 8, 2, 64), (2, 8, 2, 64)),
        "q and k must agree in batch, got shapes",
    ),
    "no-heads": (((1, 8, 0, 64),) * 3, "no dimension of q but batch, seqlen may be 0, got"),
    "copied-keys": (
        ((1, 8, 2, 2, 64),) * 3,
        r"k with heads_per_kv 2 must be expanded along it \(stride 0 in dimension 3\), got strides",
    ),
    "keys-of-another-group": (
        ((1, 8, 2, 2, 64), (1, 8, 2, 3, 64), (1, 8, 2, 3, 64)),
        "heads_per_kv of k must be that of q, 2, or 1, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", SHAPES.values(), ids=SHAPES.keys())
def test_shapes_that_do_not_fit(case: tuple[Shapes, str]) -> None:
    shapes, text = case
    with pytest.raises(ValueError, match=text):
        attend(*(draw(*shape) for shape in shapes))


DENSE: dict[str, tuple[Callable[[], object], Refusal]] = {
    "no-tensor": (
        lambda: flash_attn_func([1.0], *same(1, 8, 2, 64)[:2]),  # type: ignore[call-overload]
        (TypeError, r"q must be a torch\.Tensor, got list"),
    ),
    "dtype": (
        lambda: attend(*(x.int() for x in same(1, 8, 2, 64))),
        (TypeError, "q must be float16, bfloat16, float32 or float64 on cpu, got int32"),
    ),
    "mixed-dtype": (
        lambda: flash_attn_func(*same(1, 8, 2, 64)[:2], draw(1, 8, 2, 64).float()),
        (TypeError, "q and v must have the same dtype, got float64 and float32"),
    ),
    "device": (
        lambda: attend(*(x.to("meta") for x in same(1, 8, 2, 64))),
        (ValueError, "q must be on a CUDA device or the CPU, got device meta"),
    ),
    "scale": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=-1),
        (ValueError, "softmax_scale must be positive and finite in float32, got -1"),
    ),
    "scale-nan": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=float("nan")),
        (ValueError, "softmax_scale must be positive and finite in float32, got nan"),
    ),
    "scale-of-zero-in-float32": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=1e-46),
        (ValueError, "softmax_scale must be positive and finite in float32, got 1e-46"),
    ),
    "scale-infinite-in-float32": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=10**400),
        (ValueError, "softmax_scale must be positive and finite in float32, got 1000"),
    ),
    "scale-tensor": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=torch.tensor(0.5)),  # type: ignore[call-overload]
        (
            TypeError,
            r"(?s)softmax_scale must be a float or None, got Tensor.*hint: multiply the queries by",
        ),
    ),
    "scale-bool": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), softmax_scale=True),
        (TypeError, "softmax_scale must be a float or None, got bool"),
    ),
    "scale-text": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), scale="1"),  # type: ignore[arg-type]
        (TypeError, "^scale must be a float or None, got str"),
    ),
    "window": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), window_size=(-2, 0)),
        (ValueError, r"window_size must be two whole numbers \(left, right\), .* got \(-2, 0\)"),
    ),
    "window-length": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), window_size=(1,)),  # type: ignore[arg-type]
        (ValueError, r"window_size must be two whole numbers \(left, right\), .* got \(1,\)"),
    ),
    "window-type": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), window_size=4),  # type: ignore[call-overload]
        (ValueError, r"window_size must be two whole numbers \(left, right\), .* got 4"),
    ),
    "mask-type": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), mask=torch.ones(8, 8)),  # type: ignore[call-overload]
        (TypeError, r"mask must be a flash_dist\.BlockMask or IntervalMask, got Tensor"),
    ),
    "mask-of-torch": (
        lambda: flash_attn_func(  # type: ignore[call-overload]
            *same(1, 8, 2, 64),
            mask=causal_of_torch(),
        ),
        (TypeError, r"(?s)got torch\.nn.*\.BlockMask.*hint: `BlockMask\.from_flex` of flash_dist"),
    ),
    "mask-and-causal": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), mask=BlockMask.full(), causal=True),
        (ValueError, "mask cannot be given together with causal=True"),
    ),
    "mask-and-window": (
        lambda: flash_attn_func(*same(1, 8, 2, 64), mask=BlockMask.full(), window_size=(4, 4)),
        (ValueError, r"mask cannot be given .* window_size=\(4, 4\)"),
    ),
    "mask-of-another-shape": (
        lambda: flash_attn_func(
            *same(1, 8, 2, 64), mask=BlockMask.from_dense(torch.eye(9, dtype=torch.bool))
        ),
        (ValueError, "seqlen_q must be 9, the size that the mask was made for, got 8"),
    ),
}


def packed(**changes: Any) -> Callable[[], object]:  # noqa: ANN401
    """Return a call of the packed function with some arguments changed."""
    cu_seqlens = torch.tensor([0, 3, 8], dtype=torch.int32)
    arguments = {
        **dict(zip(("q", "k", "v"), same(8, 2, 64), strict=True)),
        "cu_seqlens_q": cu_seqlens,
        "cu_seqlens_k": cu_seqlens,
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    return lambda: flash_attn_varlen_func(**{**arguments, **changes})


VARLEN: dict[str, tuple[Callable[[], object], Refusal]] = {
    "varlen-dims": (
        packed(q=draw(1, 8, 2, 2, 64)),
        (ValueError, r"q must have 3 dimensions \[total, num_heads, head_dim\] or 4 \["),
    ),
    "cu_seqlens-type": (
        packed(cu_seqlens_q=[0, 8]),
        (TypeError, r"(?s)cu_seqlens_q must be a torch\.Tensor, got list.*hint: `torch\.as_t"),
    ),
    "cu_seqlens-dtype": (
        packed(cu_seqlens_k=torch.tensor([0, 3, 8])),
        (TypeError, r"(?s)cu_seqlens_k must be int32, got int64.*hint: `cu_seqlens_k\.int\(\)`"),
    ),
    "cu_seqlens-device": (
        packed(cu_seqlens_k=torch.tensor([0, 3, 8], dtype=torch.int32, device="meta")),
        (ValueError, "q and cu_seqlens_k must be on the same device, got cpu and meta"),
    ),
    "cu_seqlens-shape": (
        packed(cu_seqlens_q=torch.zeros(0, dtype=torch.int32)),
        (ValueError, r"cu_seqlens_q must be contiguous with shape \[batch \+ 1\]"),
    ),
    "cu_seqlens-lengths": (
        packed(cu_seqlens_q=torch.tensor([0, 8], dtype=torch.int32)),
        (ValueError, "cu_seqlens_q and cu_seqlens_k must have the same length, got 2 and 3"),
    ),
    "max_seqlen-type": (
        packed(max_seqlen_q=torch.ones(2)),
        (TypeError, r"max_seqlen_q must be .*, got a tensor of shape \[2\] and dtype float32"),
    ),
    "max_seqlen": (
        packed(max_seqlen_k=-1),
        (ValueError, "max_seqlen_k must be from 0 to 1073741823, got -1"),
    ),
}  # fmt: skip

TORCH: dict[str, tuple[Callable[[], object], Refusal]] = {
    "dropout": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), dropout_p=1.0),
        (ValueError, r"dropout_p must be at least 0 and less than 1, got 1\.0"),
    ),
    "mask-of-numbers": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), attn_mask=draw(8, 8).int()),
        (TypeError, r"(?s)or of bool or floating point, got int32.*hint: .*`attn_mask\.bool\(\)`"),
    ),
    "attn_mask-type": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), attn_mask="causal"),  # type: ignore[arg-type]
        (TypeError, r"attn_mask must be a flash_dist.BlockMask or a torch\.Tensor, got str"),
    ),
    "attn_mask-shape": (
        lambda: scaled_dot_product_attention(
            *same(1, 2, 8, 64), attn_mask=torch.ones(7, 8, dtype=torch.bool)
        ),
        (ValueError, r"attn_mask must broadcast to .* \[1, 2, 8, 8\], got shape \[7, 8\]"),
    ),
    "attn_mask-and-causal": (
        lambda: scaled_dot_product_attention(
            *same(1, 2, 8, 64), attn_mask=BlockMask.full(), is_causal=True
        ),
        (ValueError, "attn_mask cannot be given together with is_causal=True"),
    ),
    "gqa-not-enabled": (
        lambda: scaled_dot_product_attention(draw(1, 4, 8, 64), *same(1, 2, 8, 64)[:2]),
        (ValueError, "(?s)heads unless enable_gqa, got 4 and 2.*hint: `enable_gqa=True`"),
    ),
    "sdpa-dims": (
        lambda: scaled_dot_product_attention(*same(8, 64)),
        (ValueError, r"must all have 3 or 4 dimensions .* got query with shape \[8, 64\]"),
    ),
    "score_mod": (
        lambda: flex_attention(*same(1, 2, 8, 64), score_mod=lambda s, *_: s),
        (ValueError, "score_mod must be None, got <function"),
    ),
    "block_mask-type": (
        lambda: flex_attention(*same(1, 2, 8, 64), block_mask=torch.ones(8, 8)),  # type: ignore[call-overload]
        (TypeError, r"block_mask must be a BlockMask of flash_dist or of torch\..*, got Tensor"),
    ),
    "block_mask-without-references": (
        lambda: flex_attention(*same(1, 2, 8, 64), block_mask=[1]),  # type: ignore[call-overload]
        (TypeError, r"block_mask must be a BlockMask of flash_dist or of torch\..*, got list"),
    ),
    "flex-dims": (
        lambda: flex_attention(*same(2, 8, 64)),
        (ValueError, "must all have 4 dimensions"),
    ),
}  # fmt: skip

UNSERVED: dict[str, tuple[object, str]] = {
    "dropout_p": (-0.1, r"dropout_p must be at least 0 and less than 1, got -0\.1"),
    "attention_chunk": (4, r"(?s)attention_chunk must be 0, got 4: it is a mask.*hint: `BlockMask"),
    "num_splits": (4, "num_splits must be None, 0 or 1, got 4: keys are never split"),
    "qv": (draw(2), "qv must be None, got Tensor: there are no kernels with a second"),
    "sm_margin": (8, "sm_margin must be 0, got 8: kernels use all multiprocessors"),
}


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch calls its nested tensors a prototype
    NESTED = torch.nested.nested_tensor([draw(3, 2, 64), draw(5, 2, 64)])


def causal_of_torch() -> torch_flex.BlockMask:
    return torch_flex.create_block_mask(lambda _b, _h, q, k: q >= k, 1, 1, 8, 8, device="cpu")


def masked_inside(x: Tensor) -> Tensor:
    return flash_attn_func(x, x, x, mask=BlockMask.causal())


def packed_inside(longest: int) -> Tensor:
    x = torch.ones(8, 2, 64)
    return flash_attn_varlen_func(x, x, x, CU_SEQLENS, CU_SEQLENS, longest, longest)


def refuse(call: Callable[..., object], name: str) -> Case:
    """Return the case of an argument for which every value with an effect is refused."""
    value, text = UNSERVED[name]
    return (lambda: call(**{name: value})), (ValueError, text)


def attend_dense(**options: Any) -> object:  # noqa: ANN401
    return flash_attn_func(*same(1, 8, 2, 64), **options)


FLASH = {
    **{name: refuse(attend_dense, name) for name in UNSERVED},
    **{f"varlen-{name}": refuse(lambda **options: packed(**options)(), name) for name in UNSERVED},
    "return_aux": (
        lambda: flex_attention(*same(1, 2, 8, 64), return_aux=torch_flex.AuxRequest(True, True)),  # noqa: FBT003
        (ValueError, r"return_aux\.max_scores must be False, got True: of scores only lse is kept"),
    ),
    "return_aux-type": (
        lambda: flex_attention(*same(1, 2, 8, 64), return_aux=True),  # type: ignore[call-overload]
        (TypeError, r"return_aux must be an AuxRequest of torch\.nn\..* or None, got bool"),
    ),
    "return_aux-and-lse": (
        lambda: flex_attention(
            *same(1, 2, 8, 64), return_lse=True, return_aux=torch_flex.AuxRequest()
        ),
        (ValueError, r"(?s)return_lse cannot be given together .*hint: `return_aux=AuxRequest\("),
    ),
}
CU_SEQLENS = torch.tensor([0, 3, 8], dtype=torch.int32)
META = torch.zeros(8, dtype=torch.int64, device="meta")
BOOLS = torch.ones(8, 8, dtype=torch.bool)
WRONG_KIND: dict[str, Case] = {
    "nested": (
        lambda: flash_attn_func(NESTED, NESTED, NESTED),
        (ValueError, "(?s)q must be a dense tensor, got a nested one.*hint: `flash_attn_varlen"),
    ),
    "nested-heads-first": (
        lambda: scaled_dot_product_attention(NESTED, NESTED, NESTED),
        (ValueError, "query must be a dense tensor, got a nested one"),
    ),
    "sparse": (
        lambda: flash_attn_func(*same(1, 8, 2, 64)[:2], draw(1, 8, 2, 64).to_sparse()),
        (ValueError, r"(?s)v must be a dense tensor, got layout torch\.sparse_coo.*to_dense"),
    ),
    "sparse-cu_seqlens": (
        packed(cu_seqlens_q=torch.tensor([0, 3, 8], dtype=torch.int32).to_sparse()),
        (ValueError, "cu_seqlens_q must be a dense tensor, got layout"),
    ),
    "causal-tensor": (
        lambda: attend_dense(causal=torch.ones(1)),
        (TypeError, "(?s)causal must be True or False, got Tensor.*hint: `BlockMask`"),
    ),
    "causal-text": (
        packed(causal="no"),
        (TypeError, "causal must be True or False, got str"),
    ),
    "is_causal-text": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), is_causal="no"),  # type: ignore[arg-type]
        (TypeError, "is_causal must be True or False, got str"),
    ),
    "return_lse-text": (
        lambda: attend_dense(return_lse="no"),
        (TypeError, "return_lse must be True or False, got str"),
    ),
    "return_attn_probs-tensor": (
        lambda: attend_dense(return_attn_probs=torch.ones(8, 8)),
        (TypeError, "return_attn_probs must be True or False, got Tensor$"),
    ),
    "batch_invariant-tensor": (
        packed(batch_invariant=torch.ones(2)),
        (TypeError, "batch_invariant must be True or False, got Tensor$"),
    ),
    "enable_gqa-text": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64), enable_gqa="no"),  # type: ignore[arg-type]
        (TypeError, "enable_gqa must be True or False, got str"),
    ),
    "flex-return_lse-tensor": (
        lambda: flex_attention(*same(1, 2, 8, 64), return_lse=torch.ones(2)),  # type: ignore[call-overload]
        (TypeError, "return_lse must be True or False, got Tensor$"),
    ),
    "window-tensors": (
        lambda: attend_dense(window_size=(torch.ones(2), 1)),
        (ValueError, r"window_size must be two whole numbers .* got \(tensor\(\[1\., 1\.\]\), 1\)"),
    ),
    "window-bool": (
        lambda: attend_dense(window_size=(True, False)),
        (ValueError, r"window_size must be two whole numbers .* got \(True, False\)"),
    ),
    "window-tensor": (
        lambda: attend_dense(window_size=torch.tensor([1.0, 0.0])),
        (ValueError, r"window_size must be two whole numbers .* got tensor"),
    ),
    "max_seqlen-bool": (
        packed(max_seqlen_q=True),
        (TypeError, "max_seqlen_q must be an int or a tensor with one, got bool"),
    ),
    "unknown-name": (
        lambda: attend_dense(windows_size=(1, 0)),
        (TypeError, r"(?s)flash_attn_func\(\) got an unexpec.*hint: did you mean `window_size`"),
    ),
    "unknown-name-packed": (
        packed(x=1),
        (TypeError, r"flash_attn_varlen_func\(\) got an unexpected keyword argument 'x'$"),
    ),
    "qkv-shape": (
        lambda: flash_attn_qkvpacked_func(draw(1, 8, 2, 2, 64)),
        (ValueError, r"qkv must have shape \[batch, seqlen, 3, .*, got shape \[1, 8, 2, 2, 64\]"),
    ),
    "kv-packed-shape": (
        lambda: flash_attn_varlen_kvpacked_func(
            draw(8, 2, 64), draw(8, 2, 64), CU_SEQLENS, CU_SEQLENS, 5, 5
        ),
        (ValueError, r"kv must have shape \[total_k, 2, num_heads_kv, .*, got shape \[8, 2, 64"),
    ),
    "mask-tensor": (
        lambda: attend_dense(mask=BOOLS),
        (TypeError, r"(?s)BlockMask or IntervalMask, got Tensor.*hint: `BlockMask\.from_dense`"),
    ),
    "meta-ids": (
        lambda: BlockMask.documents(META),
        (ValueError, "q_ids must be a tensor with values, got one on the meta device"),
    ),
    "fake-lengths": (
        lambda: BlockMask.padding(FakeTensorMode().from_tensor(torch.ones(2).long())),
        (ValueError, "lengths must be a tensor with values, got a FakeTensor"),
    ),
    "sparse-dense": (
        lambda: BlockMask.from_dense(BOOLS.to_sparse()),
        (ValueError, r"mask must be a dense tensor, got layout torch\.sparse_coo"),
    ),
    "meta-tiles": (
        lambda: BlockMask.from_tiles(BOOLS.to("meta")),
        (ValueError, "tiles must be a tensor with values, got one on the meta device"),
    ),
    "meta-flex": (
        lambda: BlockMask.from_flex(causal_of_torch().to("meta")),
        (ValueError, "kv_indices must be a tensor with values, got one on the meta device"),
    ),
    "padding-side": (
        lambda: BlockMask.padding([1], side=[1]),  # type: ignore[arg-type]
        (ValueError, r"side must be `left` or `right`, got \[1\]"),
    ),
    "made-inside": (
        lambda: torch.compile(masked_inside, fullgraph=True, backend="eager")(draw(1, 8, 2, 64)),
        (torch._dynamo.exc.Unsupported, "a BlockMask must be made before torch.compile traces"),
    ),
    "max_seqlen-compiled": (
        lambda: torch.compile(packed_inside, fullgraph=True, backend="eager", dynamic=True)(2**30),
        (torch._dynamo.exc.Unsupported, "max_seqlen_q must be from 0 to 1073741823, got 107374182"),
    ),
    "cu_seqlens-start": (
        packed(cu_seqlens_q=torch.tensor([-1, 3, 8], dtype=torch.int32)),
        (ValueError, r"cu_seqlens_q\[0\] must be 0, got -1"),
    ),
    "cu_seqlens-descending": (
        packed(cu_seqlens_k=torch.tensor([0, 7, 6], dtype=torch.int32), max_seqlen_k=9),
        (ValueError, r"cu_seqlens_k\[2\] must be from 7 \(cu_seqlens_k\[1\]\) to 8 .* got 6"),
    ),
    "cu_seqlens-end": (
        packed(cu_seqlens_k=torch.tensor([0, 3, 9], dtype=torch.int32)),
        (ValueError, r"cu_seqlens_k\[2\] must be from 3 .* to 8 \(the tokens of k\), got 9"),
    ),
    "max_seqlen-too-small": (
        packed(max_seqlen_k=4),
        (ValueError, r"max_seqlen_k must be at least 5, .* \(from 3 at \[1\] to 8 .*, got 4"),
    ),
}  # fmt: skip
STACKED = (
    flash_attn_qkvpacked_func,
    flash_attn_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
)
CALLS = {**DENSE, **VARLEN, **TORCH, **FLASH, **WRONG_KIND}


@pytest.mark.parametrize("case", CALLS.values(), ids=CALLS.keys())
def test_calls_that_cannot_be_served(case: tuple[Callable[[], object], Refusal]) -> None:
    call, (error, text) = case
    with pytest.raises(error, match=text):
        call()


OF_ONE_TENSOR = {
    "cu_seqlens-type": ({"cu_seqlens": [0, 8]}, TypeError, "cu_seqlens must be a torch.Tensor, "),
    "cu_seqlens-dtype": (
        {"cu_seqlens": CU_SEQLENS.long()},
        TypeError,
        "cu_seqlens must be int32, got int64\n\nhint: `cu_seqlens.int()`",
    ),
    "cu_seqlens-start": (
        {"cu_seqlens": CU_SEQLENS + 1},
        ValueError,
        "cu_seqlens[0] must be 0, got 1",
    ),
    "cu_seqlens-end": (
        {"cu_seqlens": torch.tensor([0, 3, 9], dtype=torch.int32)},
        ValueError,
        "cu_seqlens[2] must be from 3 (cu_seqlens[1]) to 8 (the tokens of q of qkv), got 9",
    ),
    "max_seqlen-type": ({"max_seqlen": 5.0}, TypeError, "max_seqlen must be an int or a tensor "),
    "max_seqlen-range": ({"max_seqlen": -1}, ValueError, "max_seqlen must be from 0 to "),
    "max_seqlen-too-small": (
        {"max_seqlen": 4},
        ValueError,
        "max_seqlen must be at least 5, the longest of cu_seqlens (from 3 at [1]",
    ),
}


@pytest.mark.parametrize("case", OF_ONE_TENSOR.values(), ids=OF_ONE_TENSOR)
def test_packed_tensors_of_one_piece_are_told_of_their_own_arguments(
    case: tuple[dict[str, Any], type[Exception], str],
) -> None:
    changes, error, text = case
    arguments = {"qkv": draw(8, 3, 2, 64), "cu_seqlens": CU_SEQLENS, "max_seqlen": 5, **changes}
    with pytest.raises(error, match=re.escape(text)):
        flash_attn_varlen_qkvpacked_func(**arguments)


WHOLE = draw(1, 2, 8, 64).int()
OTHER_HEADS = draw(1, 3, 8, 64), *same(1, 2, 8, 64)[:2]
ONE_LONGER = draw(1, 2, 8, 64), draw(1, 2, 8, 64), draw(1, 2, 9, 64)
NAMED: dict[str, Case] = {
    "sdpa-dtype": (
        lambda: scaled_dot_product_attention(WHOLE, WHOLE, WHOLE),
        (TypeError, "^query must be float16, bfloat16, float32 or float64 on cpu, got int32"),
    ),
    "sdpa-dtypes": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64)[:2], draw(1, 2, 8, 64).half()),
        (TypeError, "^query and value must have the same dtype, got float64 and float16"),
    ),
    "sdpa-head_dim": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 520)),
        (ValueError, r"^head_dim must .* got 520 \(query has shape \[1, 2, 8, 520\]\)"),
    ),
    "sdpa-head_dim_v": (
        lambda: scaled_dot_product_attention(*same(1, 2, 8, 64)[:2], draw(1, 2, 8, 520)),
        (ValueError, r"^head_dim_v must .* got 520 \(value has shape \[1, 2, 8, 520\]\)"),
    ),
    "sdpa-batch": (
        lambda: scaled_dot_product_attention(draw(2, 2, 8, 64), *same(3, 2, 8, 64)[:2]),
        (ValueError, r"^query and key must agree in batch, .* \[2, 2, 8, 64\] and \[3, 2, 8, 64\]"),
    ),
    "sdpa-heads": (
        lambda: scaled_dot_product_attention(*OTHER_HEADS, enable_gqa=True),
        (ValueError, r"^num_heads_kv must divide num_heads_q, got 2 \(key\) and 3 \(query\)"),
    ),
    "sdpa-keys": (
        lambda: scaled_dot_product_attention(*ONE_LONGER),
        (ValueError, r"^key and value must have .*, got \[1, 2, 8, 64\] and \[1, 2, 9, 64\]"),
    ),
    "flex-dtype": (
        lambda: flex_attention(WHOLE, WHOLE, WHOLE),
        (TypeError, "^query must be float16, bfloat16, float32 or float64 on cpu, got int32"),
    ),
    "qkv-dtype": (
        lambda: flash_attn_qkvpacked_func(draw(1, 8, 3, 2, 64).int()),
        (TypeError, "^q of qkv must be float16, bfloat16, float32 or float64 on cpu, got int32"),
    ),
    "qkv-head_dim": (
        lambda: flash_attn_qkvpacked_func(draw(1, 8, 3, 2, 520)),
        (ValueError, r"^head_dim must .* got 520 \(q of qkv has shape \[1, 8, 2, 520\]\)"),
    ),
    "kv-dtype": (
        lambda: flash_attn_kvpacked_func(draw(1, 8, 2, 64), draw(1, 8, 2, 2, 64).half()),
        (TypeError, "^q and k of kv must have the same dtype, got float64 and float16"),
    ),
    "packed-qkv-dtype": (
        lambda: flash_attn_varlen_qkvpacked_func(draw(8, 3, 2, 64).int(), CU_SEQLENS, 5),
        (TypeError, "^q of qkv must be float16, bfloat16, float32 or float64 on cpu, got int32"),
    ),
    "packed-qkv-device": (
        lambda: flash_attn_varlen_qkvpacked_func(draw(8, 3, 2, 64), CU_SEQLENS.to("meta"), 5),
        (ValueError, "^q of qkv and cu_seqlens must be on the same device, got cpu and meta"),
    ),
    "packed-kv-heads": (
        lambda: flash_attn_varlen_kvpacked_func(
            draw(8, 3, 64), draw(8, 2, 2, 64), CU_SEQLENS, CU_SEQLENS, 5, 5
        ),
        (ValueError, r"^num_heads_kv must divide num_heads_q, got 2 \(k of kv\) and 3 \(q\)"),
    ),
    "packed-kv-end": (
        lambda: flash_attn_varlen_kvpacked_func(
            draw(8, 2, 64), draw(7, 2, 2, 64), CU_SEQLENS, CU_SEQLENS, 5, 5
        ),
        (ValueError, r"^cu_seqlens_k\[2\] must be .* to 7 \(the tokens of k of kv\), got 8"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED.values(), ids=NAMED)
def test_tensors_have_the_names_and_the_axes_that_the_caller_gave_them(case: Case) -> None:
    call, (error, text) = case
    with pytest.raises(error, match=text):
        call()


def test_of_packed_keys_in_one_tensor_with_values_the_first_may_be_used() -> None:
    q, kv, used = draw(8, 2, 64), draw(8, 2, 2, 64), torch.tensor([2, 5], dtype=torch.int32)
    k, v = kv.unbind(1)
    bounds: Any = CU_SEQLENS, CU_SEQLENS, 5, None
    got = flash_attn_varlen_kvpacked_func(q, kv, *bounds, seqused_k=used)
    want = flash_attn_varlen_func(q, k, v, *bounds, seqused_k=used)
    assert torch.equal(got, want)


@pytest.mark.parametrize("function", STACKED, ids=lambda one: one.__name__)
def test_stacked_functions_refuse_unknown_names_as_their_own(
    function: Callable[..., object],
) -> None:
    text = f"{function.__name__}() got an unexpected keyword argument 'max_seqlem'"
    close = [name for name in signature(function).parameters if name.startswith("max_seqlen")]
    if close:
        text += f"\n\nhint: did you mean `{close[0]}"
    with pytest.raises(TypeError, match=re.escape(text)):
        function(*(None for _ in range(6)), max_seqlem=5)


@pytest.mark.parametrize("scale", [1.401298464324817e-45, 3.4028234663852886e38, 1], ids=str)
def test_the_least_and_the_greatest_scale_of_float32_are_taken(scale: float) -> None:
    assert choose_scale(scale, 64) == scale


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("much", "must be a whole number of MiB, got `much`"),
        ("\u0663", "must be a whole number of MiB, got `\u0663`"),
        ("8796093022208", "must be at most 8796093022207 MiB, got `8796093022208`"),
        ("9" * 5000, "must be at most 8796093022207 MiB, got `999"),
    ],
    ids=["text", "other-digits", "too-many-bytes", "many-digits"],
)
def test_a_budget_that_is_no_number_of_bytes_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str, problem: str
) -> None:
    monkeypatch.setenv("FLASH_DIST_WORKSPACE_MB", text)
    with pytest.raises(FlashDistError, match=f"FLASH_DIST_WORKSPACE_MB {problem}"):
        flash_attn_func(*same(1, 8, 2, 64))


def test_the_largest_budget_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_DIST_WORKSPACE_MB", "0008796093022207")
    q, k, v = (x.requires_grad_() for x in same(1, 8, 2, 64))
    flash_attn_func(q, k, v).sum().backward()


def test_a_mask_made_inside_is_made_when_the_graph_may_break() -> None:
    x = draw(1, 8, 2, 64)
    compiled = torch.compile(masked_inside, backend="eager")
    assert torch.equal(compiled(x), flash_attn_func(x, x, x, causal=True))
