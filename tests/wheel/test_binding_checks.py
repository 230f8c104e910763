"""Python copies or refuses every layout that the binding's checks reject.

The binding's checks raise RuntimeError; they are for direct calls of operators. Tensors here claim
to be on a GPU. The test compares an operator's arguments with the inputs of its CUDA kernel, and
then computes on the CPU. A new operator or argument must be added to the tables below.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.utils._pytree import tree_map

import flash_dist
from flash_dist.attention import support
from flash_dist.attention.arguments import find_address
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Tensor = torch.Tensor
ALIGNMENT: Final = 16


# --- The binding's checks of each tensor, csrc/binding --------------------------------------------


def is_of_rows(x: Tensor) -> bool:
    """Tell if strides need no copy. The binding itself copies tensors at odd addresses."""
    step = ALIGNMENT // x.element_size()
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    dense = x.stride(-1) == 1 and x.shape[-1] % step == 0
    aligned = all(stride % step == 0 for size, stride in outer if size > 1)
    return dense and aligned and x.dtype in {torch.float16, torch.bfloat16}


def is_cache(x: Tensor) -> bool:
    """Tell if check_cache accepts a tensor."""
    return is_of_rows(x) and x.data_ptr() % ALIGNMENT == 0


def is_of_numbers(x: Tensor) -> bool:
    return x.dtype == torch.int32 and x.dim() == 1 and x.is_contiguous()


def is_table(x: Tensor) -> bool:
    return x.dtype == torch.int32 and x.dim() == 2 and (x.stride(1) == 1 or x.shape[1] == 1)


def is_of_floats(x: Tensor) -> bool:
    return x.dtype == torch.float32 and x.is_contiguous()


def is_bias(x: Tensor) -> bool:
    """Tell if a tensor may be a bias: in q's dtype or float32, with any strides (read_bias)."""
    return x.dim() == 4 and x.dtype in {torch.float16, torch.float32}


def is_rng_state(x: Tensor) -> bool:
    return x.dtype == torch.int64 and x.shape == (2,) and x.is_contiguous()


def is_of_angles(x: Tensor) -> bool:
    return x.dim() == 2 and x.is_contiguous() and is_of_rows(x)


def is_ours(_: Tensor) -> bool:
    """Accept tensors of this package or of autograd: the binding copies them if it must."""
    return True


CHECKS: Final[dict[str, Callable[[Tensor], bool]]] = {
    **dict.fromkeys(("q", "k", "v"), is_of_rows),
    **dict.fromkeys(("k_cache", "v_cache"), is_cache),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), is_of_numbers),
    **dict.fromkeys(("cache_seqlens", "cache_batch_idx", "cache_leftpad"), is_of_numbers),
    "block_table": is_table,
    **dict.fromkeys(("alibi_slopes", "sinks"), is_of_floats),
    "bias": is_bias,
    "rng_state": is_rng_state,
    **dict.fromkeys(("rotary_cos", "rotary_sin"), is_of_angles),
    **dict.fromkeys(("mask", "mask_data", "mask_slots"), is_ours),
    **dict.fromkeys(("dout", "dlse", "out", "lse"), is_ours),
}


IN_PYTHON: Final = ("attention_masked", "plan_")  # written in Python; they call the binding's


def find_bound() -> dict[str, Any]:
    """Return the schemas of the operators with kernels in the binding, by name."""
    names = [name.partition("::") for name in torch._C._dispatch_get_all_op_names()]
    own = {name for space, _, name in names if space == "flash_dist"}
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    own = {name for name in own if has_kernel(f"flash_dist::{name}", "CUDA")}
    own = {name for name in own if not name.startswith(IN_PYTHON)}
    return {name: torch._C._get_schema(f"flash_dist::{name}", "") for name in own}


def find_tensors(schema: Any) -> set[str]:  # noqa: ANN401
    return {x.name for x in schema.arguments if "Tensor" in str(x.type)}


def test_every_tensor_that_an_operator_takes_has_its_check_here() -> None:
    tensors = set().union(*map(find_tensors, find_bound().values()))
    assert tensors == set(CHECKS)


# --- Tensors that claim to be on a GPU ------------------------------------------------------------


class OnGpu(Tensor):
    """Records in `called` the arguments of our operators."""

    called: Final[list[tuple[str, dict[str, Any]]]] = []
    is_cuda = property(lambda _: True)
    device = property(lambda _: torch.device("cuda", 0))

    @classmethod
    def __torch_function__(
        cls,
        func: Any,  # noqa: ANN401 - torch's protocol
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        name = str(func)
        if "flash_dist" not in name:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        operator = name.removeprefix("flash_dist.").partition(".")[0]
        schema = torch._C._get_schema(f"flash_dist::{operator}", "")
        names = [argument.name for argument in schema.arguments]
        cls.called.append((operator, dict(zip(names, args, strict=False))))
        results = func(*[x.as_subclass(Tensor) if isinstance(x, Tensor) else x for x in args])
        return tree_map(on_gpu, results)


def on_gpu(x: Any) -> Any:  # noqa: ANN401
    return x.as_subclass(OnGpu) if isinstance(x, Tensor) else x


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fake a GPU with kernels for all; do not keep cached layouts for other tests."""
    chosen = {"symbol": "fwd_sm90", "binary_version": 90, "ptx_version": 90}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(support, "select", lambda *_, **__: [{"chosen": chosen}])
    OnGpu.called.clear()
    support.require_kernels.cache_clear()
    yield
    support.require_kernels.cache_clear()


# --- Calls ----------------------------------------------------------------------------------------


def half(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float16)


def int32(*numbers: Any) -> Tensor:  # noqa: ANN401
    return torch.tensor(numbers, dtype=torch.int32)


ROWS: Final = {"q": half(2, 3, 4, 16), "k": half(2, 6, 2, 16), "v": half(2, 6, 2, 16)}
PACKED: Final = {
    "q": half(6, 4, 16),
    "k": half(8, 2, 16),
    "v": half(8, 2, 16),
    "cu_seqlens_q": int32(0, 3, 6),
    "cu_seqlens_k": int32(0, 4, 8),
}
PAGED: Final = PACKED | {"k": half(4, 16, 2, 16), "v": half(4, 16, 2, 16)}
TABLE: Final = int32((0, 1), (2, 3))
SCORES: Final = {"alibi_slopes": torch.ones(4), "learnable_sink": torch.ones(4)}
CACHE: Final = {
    "q": half(2, 3, 4, 16),
    "k_cache": half(2, 32, 2, 16),
    "v_cache": half(2, 32, 2, 16),
    "cache_seqlens": int32(5, 6),
}
PAGES: Final = {"k_cache": half(4, 16, 2, 16), "v_cache": half(4, 16, 2, 16), "block_table": TABLE}
NEW: Final = {
    "k": half(2, 3, 2, 16),
    "v": half(2, 3, 2, 16),
    "rotary_cos": half(40, 8),
    "rotary_sin": half(40, 8),
}
LONGEST: Final = {"max_seqlen_q": 4, "max_seqlen_k": 32}
Call = tuple[Any, dict[str, Tensor], dict[str, Any]]
CALLS: Final[dict[str, Call]] = {
    "dense": (flash_dist.flash_attn_func, ROWS, {}),
    "scored": (flash_dist.flash_attn_func, ROWS | SCORES, {}),
    "biased": (flash_dist.flash_attn_func, ROWS | {"bias": half(2, 4, 3, 6)}, {}),
    "max logit": (flash_dist.flash_attn_func, ROWS | SCORES, {"return_max_logit": True}),
    "packed": (flash_dist.flash_attn_varlen_func, PACKED, LONGEST),
    "packed scored": (flash_dist.flash_attn_varlen_func, PACKED | SCORES, LONGEST),
    "packed biased": (
        flash_dist.flash_attn_varlen_func,
        PACKED | {"bias": half(4, 4, 32)},
        LONGEST,
    ),
    "used": (flash_dist.flash_attn_varlen_func, PACKED | {"seqused_k": int32(2, 3)}, LONGEST),
    "paged": (
        flash_dist.flash_attn_varlen_func,
        PAGED | {"block_table": TABLE, "seqused_k": int32(20, 30)} | SCORES,
        LONGEST,
    ),
    "paged by cu_seqlens": (
        flash_dist.flash_attn_varlen_func,
        PAGED | {"block_table": TABLE},
        LONGEST,
    ),
    "cache": (flash_dist.flash_attn_with_kvcache, CACHE, {}),
    "cache in pages": (flash_dist.flash_attn_with_kvcache, CACHE | PAGES, {}),
    "cache with all": (
        flash_dist.flash_attn_with_kvcache,
        CACHE | SCORES | {"cache_batch_idx": int32(0, 1), "cache_leftpad": int32(0, 0)},
        {"return_softmax_lse": True},
    ),
    "new keys": (flash_dist.flash_attn_with_kvcache, CACHE | NEW, {"causal": True}),
    "latent": (
        flash_dist.flash_mla_with_kvcache,
        {"q": half(2, 3, 4, 16).bfloat16(), "k_cache": half(4, 16, 1, 16).bfloat16()}
        | {"block_table": TABLE}
        | {"cache_seqlens": int32(20, 30)},
        {"head_dim_v": 16},
    ),
}
# Operators that these calls do not use: eager operators of plain tensors, and backwards.
OTHERS: Final = {
    "attention_no_grad",
    "attention_backward",
    "attention_backward_no_grad",
    "attention_bias_backward",
    "attention_bias_parts",
    "decode_no_lse",
}
TWINS: Final = {
    "attention_no_grad": "attention",
    "decode_no_lse": "decode",
}  # have these arguments, with equal checks


def shift(x: Tensor) -> Tensor:
    """Return a copy of x at an odd address."""
    made = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    return made.copy_(x)


def widen(x: Tensor) -> Tensor:
    """Return a copy of x with an unused element after each row in memory."""
    *outer, last = x.shape
    return torch.zeros(*outer, last + 1, dtype=x.dtype)[..., :last].copy_(x)


def spread(x: Tensor) -> Tensor:
    """Return a copy of x that uses every other element of memory."""
    *outer, last = x.shape
    return torch.zeros(*outer, last * 2, dtype=x.dtype)[..., ::2].copy_(x)


def turn(x: Tensor) -> Tensor:
    """Return a copy of x with reversed axes in memory."""
    axes = tuple(reversed(range(x.dim())))
    return x.permute(axes).contiguous().permute(axes)


CHANGES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "as it is": torch.clone,
    "odd address": shift,
    "odd rows": widen,
    "strided": spread,
    "turned": turn,
    "expanded": lambda x: x[:1].expand(x.shape),
    "of another dtype": lambda x: x.to(torch.float64 if x.is_floating_point() else torch.int64),
    "with one less": lambda x: x[:-1].clone(),
    "with one less column": lambda x: x[..., :-1].clone(),
    "with an axis more": lambda x: x.unsqueeze(0).clone(),
    "of no axes": lambda x: x.flatten()[0].clone(),
    "empty": lambda x: x[:0].clone(),
}
CASES: Final = [
    (call, argument, change)
    for call, (_, tensors, _) in CALLS.items()
    for argument, change in product(tensors, CHANGES)
    if (argument, change) != ("cache_seqlens", "of no axes")  # one number for all
]


def run(name: str, **changes: Tensor) -> None:
    function, tensors, options = CALLS[name]
    given = {key: on_gpu(x.clone()) for key, x in tensors.items()}
    function(**given | {key: on_gpu(x) for key, x in changes.items()}, **options)


@pytest.mark.parametrize(("name", "argument", "change"), CASES)
def test_a_layout_is_read_copied_or_named(name: str, argument: str, change: str) -> None:
    tensor = CHANGES[change](CALLS[name][1][argument])
    try:
        run(name, **{argument: tensor})
    except (TypeError, ValueError, FlashDistError) as error:
        assert change != "as it is", error  # noqa: PT017 - most changes are served
        said = str(error)
        assert " must " in said or " have " in said, said
        assert any(
            word in said for word in (argument, "head_dim", "seqlen", "block_table", "batch")
        ), said
    for operator, given in OnGpu.called:
        for key, x in given.items():
            assert not isinstance(x, Tensor) or CHECKS[key](x), (operator, key, x.stride())


def shrink(x: Tensor) -> Tensor:
    """Return the first element on each axis except the last, with strides of no other layout."""
    one = x[(slice(0, 1),) * (x.dim() - 1)]
    if not x.is_floating_point():
        one = one[..., :1]
    steps = [7] * (x.dim() - 1) + [1 if one.shape[-1] > 1 else 5]
    return torch.zeros(64, dtype=x.dtype).as_strided(one.shape, steps).copy_(one)


ONE: Final[dict[str, dict[str, Tensor]]] = {
    "rows": {},
    "all": {"cache_batch_idx": int32(0), "cache_leftpad": int32(1), "cache_seqlens": int32(9)},
    "pages": {"block_table": int32((0,)), "cache_seqlens": int32(9)},
}


@pytest.mark.parametrize("name", ONE)
def test_strides_of_axes_of_one_never_matter(name: str) -> None:
    tensors = {"q": half(1, 1, 1, 16), "k_cache": half(1, 16, 1, 16), "v_cache": half(1, 16, 1, 16)}
    where = ONE[name]
    given = {key: on_gpu(x) for key, x in tensors.items()}
    given["q"] = on_gpu(shrink(tensors["q"]))
    odd = {key: on_gpu(shrink(x)) for key, x in where.items()}
    assert all(x.stride() != where[key].stride() for key, x in odd.items())
    out = flash_dist.flash_attn_with_kvcache(**given, **odd)
    assert torch.equal(out.as_subclass(Tensor), half(1, 1, 1, 16))
    ((_, called),) = OnGpu.called
    assert all(called[key].data_ptr() == x.data_ptr() for key, x in odd.items())  # without a copy


def test_one_used_key_may_be_told_by_a_column() -> None:
    ends = int32(0, 4)
    q, k, v = (half(4, 2, 16) for _ in range(3))
    used = int32(3, 0, 0).view(3, 1)[::3, 0]
    assert used.stride() == (3,)
    out = flash_dist.flash_attn_varlen_func(q, k, v, ends, ends, 4, 4, seqused_k=used)
    assert torch.equal(out, q)


@pytest.mark.parametrize(
    ("strides", "axis", "aligned"),
    [((32, 16, 1), 0, True), ((24, 8, 1), 0, True), ((17, 8, 1), 0, False), ((8, 17, 1), 1, False)],
)
def test_an_address_under_vmap_is_that_of_every_entry(
    strides: tuple[int, ...], axis: int, *, aligned: bool
) -> None:
    x = torch.zeros(128, dtype=torch.float16).as_strided((2, 2, 8), strides)
    told: list[bool] = []

    def note(one: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            one.data_ptr()
        told.append(find_address(one) % ALIGNMENT == 0)
        return one.clone()

    torch.vmap(note, in_dims=axis)(x)
    assert told == [aligned]


def test_the_calls_above_take_every_operator_that_a_call_can_take() -> None:
    for name in CALLS:
        run(name)
    seen = {name for name, _ in OnGpu.called}
    assert seen - OTHERS == set(find_bound()) - OTHERS
    for name, twin in TWINS.items():
        ours, theirs = (find_tensors(find_bound()[one]) for one in (name, twin))
        assert ours - {"mask"} <= theirs
