"""No gradient is dropped silently, and unused keys have gradients of 0."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flash_dist
from flash_dist.compat import flash_attn
from flash_dist.errors import FlashDistError

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor
MOST: Final = 2**31 - 1


def int32(*numbers: Any) -> Tensor:  # noqa: ANN401 - nested numbers
    return torch.tensor(numbers, dtype=torch.int32)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, dtype=dtype)


# --- Unused keys ---------------------------------------------------------------------------------

ENDS_Q: Final = (0, 3, 3, 8)  # rows from 8 on are uncovered
ENDS_K: Final = (0, 10, 13, 25)
USED: Final = (4, 3, MOST)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": True},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "slopes of each": {"alibi_slopes": torch.tensor([[0.5, 0.25], [0.1, 0.2], [0.3, 0.7]])},
}


def attend_used(q: Tensor, k: Tensor, v: Tensor, used: Tensor, **options: Any) -> Any:  # noqa: ANN401
    ends = int32(*ENDS_Q), int32(*ENDS_K)
    return flash_dist.flash_attn_varlen_func(q, k, v, *ends, 5, 12, seqused_k=used, **options)


def attend_each(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:  # noqa: ANN401
    """Return out of each sequence alone, with its used keys."""
    slopes = options.pop("alibi_slopes", None)
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=q.dtype)
    for i, used in enumerate(USED):
        rows = slice(ENDS_Q[i], ENDS_Q[i + 1])
        keys = slice(ENDS_K[i], min(ENDS_K[i] + used, ENDS_K[i + 1]))
        if slopes is not None:
            options["alibi_slopes"] = slopes if slopes.dim() == 1 else slopes[i]
        one = q[None, rows], k[None, keys], v[None, keys]
        out[rows] = flash_dist.flash_attn_func(*one, **options)[0]
    return out


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_of_used_keys_are_those_of_each_sequence_alone(name: str) -> None:
    q, k, v = leaves = [draw(n, 2, 16).requires_grad_() for n in (11, 30, 30)]
    options = OPTIONS[name]
    out = attend_used(q, k, v, int32(*USED), **options)
    want = attend_each(q, k, v, **options)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    dout = draw(*out.shape, seed=1)
    got = torch.autograd.grad(out, leaves, dout)
    torch.testing.assert_close(got, torch.autograd.grad(want, leaves, dout), atol=1e-12, rtol=1e-12)
    left_out = [*range(4, 10), *range(25, 30)]
    assert not any(x[left_out].any() for x in got[1:])
    assert all(x[:4].any() for x in got[1:])


@pytest.mark.parametrize("name", OPTIONS)
def test_used_keys_give_the_same_with_gradients_and_without(name: str) -> None:
    q, k, v = (draw(n, 2, 16) for n in (11, 30, 30))
    used, options = int32(*USED), {"return_lse": True, **OPTIONS[name]}
    results = attend_used(q, k, v, used, **options)
    trained = attend_used(q, k.requires_grad_(), v, used, **options)
    assert [x.requires_grad for x in (*results, *trained)] == [False, False, True, True]
    torch.testing.assert_close(trained, results, atol=1e-12, rtol=1e-12)


def test_sinks_of_used_keys_have_a_gradient() -> None:
    q, k, v = (draw(n, 2, 16) for n in (11, 30, 30))
    sinks = draw(2).requires_grad_()
    out = attend_used(q, k, v, int32(*USED), learnable_sink=sinks)
    (got,) = torch.autograd.grad(out.sum(), sinks)
    want = torch.autograd.grad(attend_each(q, k, v, learnable_sink=sinks).sum(), sinks)[0]
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-12)
    assert got.abs().min() > 0


@pytest.mark.parametrize("module", [flash_dist, flash_attn], ids=["ours", "compat"])
def test_a_step_of_training_with_a_residual_is_right_with_used_keys(module: Any) -> None:  # noqa: ANN401
    linear = torch.nn.Linear(16, 16).double()
    x, k, v = draw(9, 2, 16), draw(9, 2, 16), draw(9, 2, 16)
    ends = int32(0, 4, 9)

    def step(**used: Tensor) -> Tensor:
        q = linear(x)
        out = module.flash_attn_varlen_func(q, k, v, ends, ends, 5, 5, causal=True, **used)
        (gradient,) = torch.autograd.grad((out + q).sum(), linear.weight)
        return gradient

    torch.testing.assert_close(step(seqused_k=int32(4, 5)), step())


def test_used_keys_of_stacked_tensors_have_gradients() -> None:
    kv, q = draw(30, 2, 2, 16).requires_grad_(), draw(11, 2, 16)
    ends = int32(*ENDS_Q), int32(*ENDS_K)
    options: dict[str, Any] = {"seqused_k": int32(*USED)}
    out = flash_dist.flash_attn_varlen_kvpacked_func(q, kv, *ends, 5, 12, **options)
    (got,) = torch.autograd.grad(out.sum(), kv)
    leaves = [x.detach().requires_grad_() for x in kv.unbind(1)]
    want = torch.autograd.grad(attend_each(q, *leaves).sum(), leaves)
    torch.testing.assert_close(got, torch.stack(want, 1), atol=1e-12, rtol=1e-12)


def test_used_keys_have_gradients_under_torch_func_and_torch_compile() -> None:
    q, k, v = (draw(n, 2, 16) for n in (11, 30, 30))

    def loss(q: Tensor, k: Tensor, v: Tensor, used: Tensor) -> Tensor:
        return attend_used(q, k, v, used, causal=True).square().sum()  # type: ignore[no-any-return]

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def differentiate(loss: Callable[..., Tensor], *used: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(loss(*leaves, int32(*used)), leaves)

    want = differentiate(loss, *USED)
    got = torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v, int32(*USED))
    assert all(map(torch.equal, got, want))
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for numbers in (USED, (1, 2, 3)):
        wanted = differentiate(loss, *numbers)
        traced = differentiate(compiled, *numbers)
        torch.testing.assert_close(traced, wanted, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqused_k": int32(1, -2, 3)}, r"seqused_k\[1\] must be at least 0, got -2"),
        ({"seqused_k": int32(1, 2)}, r"seqused_k must be contiguous with shape \[batch\], \[3\]"),
        ({"max_seqlen_k": 3}, r"max_seqlen_k must be at least 4, which seqused_k\[0\] uses, got 3"),
        ({"seqused_k": [1, 2, 3]}, "seqused_k must be a torch.Tensor, got list"),
        ({"cu_seqlens_k": None}, "cu_seqlens_k must be a torch.Tensor, got NoneType"),
    ],
)
def test_what_does_not_fit_used_keys_is_named_where_gradients_are_wanted(
    changes: dict[str, Any], message: str
) -> None:
    arguments = {
        "cu_seqlens_q": int32(*ENDS_Q),
        "cu_seqlens_k": int32(*ENDS_K),
        "max_seqlen_q": 5,
        "max_seqlen_k": 12,
        "seqused_k": int32(4, 3, 12),
        **changes,
    }
    if "max_seqlen_k" in changes:
        arguments["seqused_k"] = int32(4, 3, 2)
    q, k, v = (draw(n, 2, 16).requires_grad_() for n in (11, 30, 30))
    with pytest.raises((TypeError, ValueError), match=message):
        flash_dist.flash_attn_varlen_func(q, k, v, **arguments)


def test_the_greatest_number_of_used_keys_is_all_of_them() -> None:
    q, k, v = (draw(n, 2, 16) for n in (11, 30, 30))
    out = attend_used(q, k, v, int32(MOST, MOST, MOST))
    assert torch.equal(out, attend_used(q, k, v, int32(10, 3, 12)))


# --- Calls without gradients ---------------------------------------------------------------------

TABLE: Final = torch.arange(4, dtype=torch.int32).view(2, 2)
ENDS, LENGTHS = int32(0, 1, 2), int32(20, 3)


def attend_cache(**tensors: Any) -> Any:  # noqa: ANN401
    return flash_dist.flash_attn_with_kvcache(**tensors, cache_seqlens=3)


def attend_latent(**tensors: Any) -> Any:  # noqa: ANN401
    where: dict[str, Any] = {"block_table": TABLE, "cache_seqlens": LENGTHS}
    return flash_dist.flash_mla_with_kvcache(**tensors, **where, head_dim_v=32)[0]


def attend_pages(**tensors: Any) -> Any:  # noqa: ANN401
    where: dict[str, Any] = {"block_table": TABLE, "seqused_k": LENGTHS}
    return flash_dist.flash_attn_varlen_func(
        **tensors, **where, cu_seqlens_q=ENDS, cu_seqlens_k=None, max_seqlen_q=1, max_seqlen_k=32
    )


ARGUMENTS: dict[str, tuple[Callable[..., Tensor], dict[str, tuple[int, ...]]]] = {
    "flash_attn_with_kvcache": (
        attend_cache,
        {
            "q": (2, 1, 2, 16),
            "k_cache": (2, 32, 2, 16),
            "v_cache": (2, 32, 2, 16),
            "k": (2, 1, 2, 16),
            "v": (2, 1, 2, 16),
            "rotary_cos": (32, 8),
            "rotary_sin": (32, 8),
            "learnable_sink": (2,),
        },
    ),
    "flash_mla_with_kvcache": (attend_latent, {"q": (2, 1, 4, 64), "k_cache": (4, 16, 1, 64)}),
    "flash_attn_varlen_func with block_table": (
        attend_pages,
        {"q": (2, 2, 16), "k": (4, 16, 2, 16), "v": (4, 16, 2, 16), "learnable_sink": (2,)},
    ),
}


class Decoding:
    """A call without gradients, with all of its inputs."""

    def __init__(self, function: str) -> None:
        self.run, shapes = ARGUMENTS[function]
        self.tensors = {name: draw(*x, seed=i) for i, (name, x) in enumerate(shapes.items())}

    def __call__(self, **changes: Tensor) -> Tensor:
        return self.run(**{**self.tensors, **changes})


CASES = [
    pytest.param(function, argument, id=f"{function}-{argument}")
    for function, (_, arguments) in ARGUMENTS.items()
    for argument in arguments
]


@pytest.mark.parametrize(("function", "argument"), CASES)
def test_what_has_no_gradients_says_so_by_the_argument_that_wants_one(
    function: str, argument: str
) -> None:
    call = Decoding(function)
    leaf = call.tensors[argument].clone().requires_grad_()
    text = rf"(?s)^{function} has no gradients, got {argument} that .*hint: .*`torch\.no_grad\(\)`"
    for wanted in (leaf, leaf * 1, leaf[:]):  # a leaf, a result, a view
        with pytest.raises(FlashDistError, match=text):
            call(**{argument: wanted})
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert not call(**{argument: leaf.detach().clone()}).requires_grad
    with torch.no_grad():
        assert not call(**{argument: leaf}).requires_grad
    assert not call(**{argument: leaf.detach()}).requires_grad


@pytest.mark.parametrize(("function", "argument"), CASES)
def test_nothing_is_written_where_gradients_are_refused(function: str, argument: str) -> None:
    call = Decoding(function)
    before = {name: x.clone() for name, x in call.tensors.items()}
    call.tensors[argument].requires_grad_()
    with pytest.raises(FlashDistError, match="has no gradients"):
        call()
    assert all(torch.equal(x, before[name]) for name, x in call.tensors.items())


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own jvp
@pytest.mark.parametrize(("function", "argument"), CASES)
def test_forward_mode_is_refused_at_every_level_of_torch_func(function: str, argument: str) -> None:
    call = Decoding(function)
    x = call.tensors[argument]

    def run(one: Tensor) -> Tensor:
        return call(**{argument: one})

    ways: list[Callable[[], object]] = [
        lambda: torch.func.jvp(run, (x,), (x,)),
        lambda: torch.func.jvp(torch.vmap(run), (x[None],), (x[None],)),
        lambda: torch.vmap(lambda one: torch.func.jvp(run, (one,), (one,)))(x[None]),
    ]
    for way in ways:
        with pytest.raises(FlashDistError, match=r"has no gradients, got \w+ with a tangent, in f"):
            way()


@pytest.mark.parametrize("function", ARGUMENTS)
@pytest.mark.parametrize("reentrant", [False, True], ids=["new", "reentrant"])
def test_checkpointing_drops_no_gradient_in_silence(function: str, *, reentrant: bool) -> None:
    call = Decoding(function)
    q = call.tensors["q"].clone().requires_grad_()

    def train() -> None:
        out = checkpoint(lambda one: call(q=one) + one.sum(), q, use_reentrant=reentrant)
        out.sum().backward()

    with pytest.raises(FlashDistError, match=f"{function} has no gradients, got q that requires"):
        train()


@pytest.mark.slow
@pytest.mark.parametrize("function", ARGUMENTS)
def test_a_graph_drops_no_gradient_in_silence(function: str) -> None:
    call = Decoding(function)
    q = call.tensors["q"].clone()
    want = call()

    def run(one: Tensor) -> Tensor:
        return call(q=one)

    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert torch.equal(whole(q), want)
    with torch.no_grad():
        assert torch.equal(whole(q.requires_grad_()), want)
    with pytest.raises(Exception, match=f"(?s){function} has no gradients, got q .*no_grad"):
        whole(q)
    with pytest.raises(FlashDistError, match="has no gradients"):
        torch.compile(run, backend="aot_eager")(q)


@pytest.mark.slow
def test_a_refusal_in_a_graph_leaves_torch_func_as_it_was() -> None:
    call = Decoding("flash_attn_with_kvcache")
    q = call.tensors["q"].clone().requires_grad_()
    with pytest.raises(FlashDistError, match="has no gradients"):
        torch.compile(lambda one: call(q=one), backend="aot_eager")(q)

    def loss(x: Tensor) -> Tensor:
        return flash_dist.flash_attn_func(x, x, x).square().sum()

    gradient = torch.func.grad(loss)
    x = draw(1, 5, 2, 8)
    assert torch.equal(torch.compile(gradient, backend="aot_eager")(x), gradient(x))
