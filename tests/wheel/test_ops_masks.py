"""One mask object, many devices, threads and compiled graphs: on the CPU and the meta device."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils.checkpoint import checkpoint

from flash_dist.attention.autograd import attend
from flash_dist.attention.flex import flex_attention
from flash_dist.errors import FlashDistError
from flash_dist.kernels.problem import Problem
from flash_dist.masks import BlockMask, registry
from flash_dist.masks.inputs import Shape
from flash_dist.masks.upload import upload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Attention = Callable[..., torch.Tensor]

Tensor = torch.Tensor

META = torch.device("meta")
CPU = torch.device("cpu")
SEQLEN = 6
SHAPE = Shape(1, 2, SEQLEN, SEQLEN)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    registry._cached.clear()
    gc.collect()
    yield
    registry._cached.clear()


def make_mask(start: int = 2) -> BlockMask:
    """Return a mask of two documents; the second begins at `start`."""
    return BlockMask.documents([int(token >= start) for token in range(SEQLEN)])


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, SEQLEN, 2, 8, dtype=dtype, generator=generator).unbind()
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def attention(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> Tensor:
    out, _ = attend(q, k, v, Problem(mask, 0.5))
    return out


def compiled(function: Attention = attention) -> tuple[Attention, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, fullgraph=True, backend=counter), counter


def check_step(function: Attention, mask: BlockMask, dtype: torch.dtype = torch.float64) -> None:
    expected = step(attention, mask, dtype)
    for got, want in zip(step(function, mask, dtype), expected, strict=True):
        torch.testing.assert_close(got, want)


def step(function: Attention, mask: BlockMask, dtype: torch.dtype) -> list[Tensor]:
    inputs = draw(dtype)
    out = function(*inputs, mask)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]


def test_masks_compile_once_for_the_first_and_once_for_all_others() -> None:
    function, counter = compiled()
    counts = []
    for start in range(1, SEQLEN):
        mask = make_mask(start)
        for dtype in (torch.float64, torch.float32):  # two dtypes represent two devices
            check_step(function, mask, dtype)
        counts.append(counter.frame_count)
    assert counts == [2, 4, 4, 4, 4]


def test_a_mask_of_a_module_is_compiled_in() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = make_mask()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attention(q, k, v, self.mask)

    layer = Layer()
    function, counter = compiled(layer)
    for mask in (layer.mask, make_mask(4)):
        layer.mask = mask
        check_step(lambda q, k, v, _: function(q, k, v), mask)
        check_step(lambda q, k, v, _: function(q, k, v), mask)
    assert counter.frame_count == 2


class Exported(torch.nn.Module):
    def __init__(self, mask: BlockMask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, self.mask)


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "dynamo"])
def test_a_band_is_exported(*, strict: bool) -> None:
    module, inputs = Exported(BlockMask.causal()), draw()
    program = torch.export.export(module, inputs, strict=strict)
    assert torch.equal(program.module()(*inputs), module(*inputs))


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "dynamo"])
def test_a_mask_that_another_process_would_not_find_is_not_exported(*, strict: bool) -> None:
    error = torch._dynamo.exc.Unsupported if strict else TypeError
    with pytest.raises(error, match=r"torch\.export takes a mask that is a band only, got <Block"):
        torch.export.export(Exported(make_mask()), draw(), strict=strict)


def test_checkpointing_finds_the_mask_again() -> None:
    def inside(*arguments: object) -> Tensor:
        out: Tensor = checkpoint(attention, *arguments, use_reentrant=False)
        return out

    function, _ = compiled(inside)
    plain, _ = compiled()

    def outside(*arguments: object) -> Tensor:
        out: Tensor = checkpoint(plain, *arguments, use_reentrant=False)
        return out

    for start in (2, 3, 4):
        for one in (inside, function, outside):
            check_step(one, make_mask(start))


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
def test_a_dropped_mask_lives_until_the_backward(*, compiles: bool) -> None:
    function = compiled()[0] if compiles else attention
    for start in (2, 3, 4):
        expected = step(attention, make_mask(start), torch.float64)
        inputs, mask = draw(), make_mask(start)
        out = function(*inputs, mask)
        del mask
        gc.collect()
        out.square().sum().backward()
        assert torch.equal(inputs[0].grad, expected[1])  # type: ignore[arg-type]


def test_a_mask_lost_to_many_others_is_missed_in_words() -> None:
    function, _ = compiled()
    out = function(*draw(), make_mask())
    others = [make_mask() for _ in range(registry.MAX_CACHED)]
    for mask in others:
        registry.cache(mask.handle)
    gc.collect()
    with pytest.raises(FlashDistError, match=r"must live until its backward.*\n\nhint: keep a ref"):
        out.sum().backward()


def test_eager_calls_keep_no_mask() -> None:
    mask = make_mask()
    attention(*draw(), mask)
    registry.lookup(mask.handle, META, SHAPE)
    seen = weakref.ref(mask), weakref.ref(registry.lookup(mask.handle, CPU, SHAPE).plan)
    del mask
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


def test_handles_are_never_used_again() -> None:
    handles = []
    for _ in range(10):
        mask = make_mask()
        handles += [mask.handle, pickle.loads(pickle.dumps(mask)).handle]  # noqa: S301 - our own
        assert copy.deepcopy(mask).handle == mask.handle
        assert registry.find(mask.handle) is mask
    assert len(set(handles)) == len(handles)
    assert min(handles) >= registry.FIRST_HANDLE


def test_many_threads_make_the_tensors_of_each_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(host: Tensor, device: torch.device) -> Tensor:
        made.append(device)
        return upload(host, device)

    monkeypatch.setattr(registry, "upload", counted)
    devices, threads = (META, CPU), 16
    for start in range(1, SEQLEN):
        mask, barrier = make_mask(start), Barrier(threads)

        def use(
            i: int, mask: BlockMask = mask, barrier: Barrier = barrier
        ) -> tuple[torch.device, int]:
            barrier.wait()
            device = devices[i % 2]
            return device, id(registry.lookup(mask.handle, device, SHAPE).data)

        with ThreadPoolExecutor(threads) as pool:
            found = set(pool.map(use, range(threads)))
        assert len(found) == len(devices)
    assert len(made) == len(devices) * (SEQLEN - 1)


def test_shapes_that_differ_where_the_mask_does_not_share_tensors() -> None:
    mask = make_mask()
    one = registry.lookup(mask.handle, META, SHAPE)
    other = registry.lookup(mask.handle, META, SHAPE._replace(batch=3, num_heads_q=8))
    assert one.data is other.data


def test_tensors_of_shapes_not_used_for_long_are_dropped() -> None:
    mask = BlockMask.prefix([2])
    first = weakref.ref(registry.lookup(mask.handle, META, SHAPE).plan)
    for seqlen in range(SEQLEN + 1, SEQLEN + 1 + registry.MAX_SHAPES):
        registry.lookup(mask.handle, META, Shape(1, 1, seqlen, seqlen))
    gc.collect()
    assert first() is None


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads .grad of a non-leaf
@pytest.mark.parametrize("inside", [False, True], ids=["torch's", "made inside"])
def test_a_graph_that_breaks_at_a_mask_gives_what_eager_gives(*, inside: bool) -> None:
    ids = torch.arange(130) // 40
    block_mask = create_block_mask(
        lambda _b, _h, q, k: ids[q] == ids[k], None, None, 130, 130, device="cpu"
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask: Any = BlockMask.from_flex(block_mask) if inside else block_mask
        return flex_attention(q * 1.0, k, v, block_mask=mask) + 1

    q, k, v = (torch.randn(1, 2, 130, 16, requires_grad=True) for _ in range(3))
    torch.compiler.reset()
    out = torch.compile(call, backend="aot_eager")(q, k, v)
    want = call(q, k, v)
    assert torch.equal(out, want)
    grads, wanted = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, want))
    assert all(torch.equal(a, b) for a, b in zip(grads, wanted, strict=True))
