"""The kernels for a cache of latent keys, emulated: values, bits, and memory accesses."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch

from tests.unit.made.emulator import Gpu, emulate

Tensor = torch.Tensor

pytestmark = pytest.mark.slow  # the first test compiles: 30 s

HEAD_DIM: Final = 576
HEAD_DIM_V: Final = 512


@dataclass(frozen=True)
class Problem:
    """Queries to a cache, one head_dim for all heads."""

    lengths: tuple[int, ...]
    heads: int = 16
    seqlen_q: int = 1
    heads_kv: int = 1
    head_dim: int = HEAD_DIM
    head_dim_v: int = HEAD_DIM_V
    values_in_keys: bool = True
    slope: float = 0.0  # by which scores grow from key to key

    def make(self) -> dict[str, Any]:
        """Return random tensors, without pages; keys after a sequence are NaN."""
        generator = torch.Generator().manual_seed(sum(self.lengths) + self.heads)
        batch, capacity = len(self.lengths), -(-max(*self.lengths, 1) // 64) * 64

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).bfloat16()

        k = normal(batch, capacity, self.heads_kv, self.head_dim)
        v = normal(batch, capacity, self.heads_kv, self.head_dim_v)
        q = normal(batch, self.seqlen_q, self.heads, self.head_dim)
        if self.slope:
            k[..., 0] = self.slope * torch.arange(capacity)[:, None]
            q[..., 0] = self.head_dim**0.5
        for b, length in enumerate(self.lengths):
            k[b, length:] = math.nan
            v[b, length:] = math.nan
        return {
            "q": q,
            "k": k,
            "v": None if self.values_in_keys else v,
            "lengths": torch.tensor(self.lengths, dtype=torch.int32),
            "head_dim_v": self.head_dim_v,
        }

    def solve(self, tensors: dict[str, Any], *, causal: bool) -> tuple[Tensor, Tensor]:
        """Return out and lse in float64, one sequence and head after the other."""
        q, k = tensors["q"].double(), tensors["k"].double()
        v = k[..., : self.head_dim_v] if self.values_in_keys else tensors["v"].double()
        out = torch.zeros(*q.shape[:3], self.head_dim_v, dtype=torch.float64)
        lse = torch.full((q.shape[0], self.heads, self.seqlen_q), -math.inf, dtype=torch.float64)
        for b, length in enumerate(self.lengths):
            for h in range(self.heads):
                kv = h * self.heads_kv // self.heads
                for i in range(self.seqlen_q):
                    end = length - self.seqlen_q + i + 1 if causal else length
                    if end <= 0:
                        continue
                    scores = k[b, :end, kv] @ q[b, i, h] * self.head_dim**-0.5
                    lse[b, h, i] = scores.logsumexp(0)
                    out[b, i, h] = (scores - lse[b, h, i]).exp() @ v[b, :end, kv]
        return out, lse


PROBLEMS: Final = {
    "one tile": Problem((1, 31, 32)),
    "one unit": Problem((33, 127, 128)),
    "no keys": Problem((0, 5), seqlen_q=2),
    "two groups": Problem((1024, 1025)),
    "more units than lanes": Problem((4500,), heads=2),
    "several rows of tiles": Problem((300,), heads=40, seqlen_q=3),
    "few heads": Problem((200, 70), heads=5),
    "few columns": Problem((150,), head_dim=288, head_dim_v=256),
    "several kv heads": Problem((260,), heads=6, heads_kv=2, seqlen_q=4),
    "many heads": Problem((1024, 1025), heads=64),
    "parts of a group": Problem((512, 513, 1537), heads=17),
    "a few more heads": Problem((0, 63, 65, 129), heads=50, seqlen_q=3),
    "scores that grow": Problem((700,), heads=20, slope=0.1),
    "scores that fall": Problem((700,), heads=20, slope=-0.1),
    "many tiles of many heads": Problem((1, 70, 129) * 11, heads=66),
    "many heads of few columns": Problem((150,), heads=48, head_dim=288, head_dim_v=256),
    # checks the emulator itself, with a kernel that is proven on GPUs
    "values of their own": Problem((300, 70), 8, 3, 2, 64, 64, values_in_keys=False),
    # several warps share the tiles of keys
    "large values of their own": Problem((300, 70), 8, 3, 2, 512, 512, values_in_keys=False),
    "some large columns": Problem((0, 1100), 4, 2, 1, 264, 264, values_in_keys=False),
}


AMPERE: Final = Gpu()
HOPPER: Final = Gpu(plan=227, capability=90)
WHOLE: Final = replace(HOPPER, budget=0)  # without room for P of all tiles
PAIRS: Final = replace(WHOLE, sm_count=132)  # and with two multiprocessors for each work tile


@pytest.mark.parametrize(
    "gpu", [AMPERE, HOPPER, WHOLE, PAIRS], ids=["8.0", "9.0", "9.0 without room", "9.0 in pairs"]
)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_values_are_those_of_float64(name: str, gpu: Gpu, *, causal: bool) -> None:
    problem = PROBLEMS[name]
    tensors = problem.make()
    out, lse, conflicts = emulate(**tensors, causal=causal, gpu=gpu)
    expected, expected_lse = problem.solve(tensors, causal=causal)
    torch.testing.assert_close(out.double(), expected, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(lse.double(), expected_lse, atol=1e-5, rtol=1e-5)
    assert conflicts == 0


LENGTHS: Final = (1500, 0, 300, 2500, 128)
CALLS: Final = {  # calls that reach each kernel, and each way to distribute the work
    "8.0": (Problem(LENGTHS, seqlen_q=2), AMPERE),
    "9.0, many heads": (Problem(LENGTHS, heads=50, seqlen_q=2), HOPPER),
    "9.0, half a tile of rows": (Problem(LENGTHS, heads=17, seqlen_q=2), HOPPER),
    # work tiles are split if there are as many as multiprocessors
    "9.0, equal lengths": (Problem((1300,) * len(LENGTHS), heads=64, seqlen_q=1), HOPPER),
}
CHANGES: Final[dict[str, dict[str, int]]] = {
    "one multiprocessor": {"sm_count": 1, "seed": 1},
    "seven": {"sm_count": 7, "seed": 2},
    "forty": {"sm_count": 40, "seed": 3},
    "less shared memory": {"plan": 99, "seed": 4},
    "no workspace": {"budget": 0, "seed": 5},
    "little workspace": {"sm_count": 13, "budget": 20 << 20, "seed": 6},
    "pairs": {"sm_count": 80, "budget": 0, "seed": 7},
    "pairs that share work tiles": {"sm_count": 80, "budget": 44 << 20, "seed": 8},
}


@dataclass(frozen=True)
class Call:
    """A call, and its results on a GPU of 3 multiprocessors."""

    tensors: dict[str, Any]
    gpu: Gpu
    out: Tensor
    lse: Tensor

    def assert_same(self, rows: slice = slice(None), **changes: Any) -> None:  # noqa: ANN401
        """Check equal bits for some sequences, with some arguments changed."""
        arguments = {**self.tensors, "causal": True, "gpu": self.gpu, **changes}
        out, lse, _ = emulate(**arguments)
        assert_same_bits(self.out[rows], out)
        assert_same_bits(self.lse[rows], lse)


def assert_same_bits(one: Tensor, other: Tensor) -> None:
    kind = torch.int16 if one.element_size() == 2 else torch.int32
    assert torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


@pytest.fixture(scope="module", params=CALLS)
def call(request: pytest.FixtureRequest) -> Call:
    """Return a call in which some sequences are split."""
    problem, gpu = CALLS[request.param]
    tensors = problem.make()
    out, lse, _ = emulate(**tensors, causal=True, gpu=gpu)
    return Call(tensors, gpu, out, lse)


@pytest.mark.parametrize("name", CHANGES)
def test_bits_are_the_same_whoever_computes(name: str, call: Call) -> None:
    changes = CHANGES[name]
    if call.gpu is HOPPER and "plan" in changes:
        pytest.skip("many heads have one tile there")
    call.assert_same(gpu=replace(call.gpu, **changes))


@pytest.mark.parametrize("b", range(len(LENGTHS)))
def test_bits_are_the_same_alone(b: int, call: Call) -> None:
    one = slice(b, b + 1)
    call.assert_same(one, **{name: call.tensors[name][one] for name in ("q", "k", "lengths")})


OWN_VALUES: Final[dict[str, Any]] = {"head_dim": 64, "head_dim_v": 64, "values_in_keys": False}
FOLDED: Final = {
    "more groups than a block folds at a time": Problem((40000,), heads=1, **OWN_VALUES),
    "more parts than a warp has slots for": Problem((9000, 100), 8, 2, 2, **OWN_VALUES),
    "more pieces than warps": Problem((1100,) * 9, 16, 3, 1, **OWN_VALUES),
}


@pytest.mark.parametrize("sm_count", [2, 13, 40])
@pytest.mark.parametrize("name", FOLDED)
def test_what_several_blocks_computed_has_the_bits_of_one(name: str, sm_count: int) -> None:
    tensors = FOLDED[name].make()
    out, lse, _ = emulate(**tensors, gpu=Gpu(budget=0))
    folded, folded_lse, _ = emulate(**tensors, gpu=Gpu(sm_count=sm_count, seed=sm_count))
    assert_same_bits(out, folded)
    assert_same_bits(lse, folded_lse)


def test_a_head_has_the_same_bits_beside_fewer_heads(call: Call) -> None:
    heads = 17 if call.gpu is HOPPER else 5
    q = call.tensors["q"][:, :, -heads:].contiguous()
    out, lse, _ = emulate(**{**call.tensors, "q": q}, causal=True, gpu=call.gpu)
    assert_same_bits(call.out[:, :, -heads:], out)
    assert_same_bits(call.lse[:, -heads:], lse)


@pytest.mark.parametrize("page", [16, 64])
def test_bits_are_the_same_in_pages(page: int, call: Call) -> None:
    k = call.tensors["k"]
    pages = k.shape[0] * k.shape[1] // page
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(page))
    moved = torch.empty_like(k).reshape(pages, page, 1, HEAD_DIM)
    moved[order] = k.reshape(moved.shape)
    call.assert_same(k=moved, table=order.reshape(k.shape[0], -1).to(torch.int32))


@pytest.mark.parametrize("gpu", [HOPPER, WHOLE, PAIRS], ids=["9.0", "without room", "in pairs"])
def test_sequences_that_share_all_pages_have_the_bits_of_one(gpu: Gpu) -> None:
    tensors = Problem((320,), heads=20).make()
    out, lse, _ = emulate(**tensors, gpu=gpu)
    several = {
        "q": tensors["q"].expand(8, -1, -1, -1).contiguous(),
        "k": tensors["k"].reshape(5, 64, 1, HEAD_DIM),
        "lengths": tensors["lengths"].expand(8).contiguous(),
        "table": torch.arange(5, dtype=torch.int32).expand(8, -1).contiguous(),
    }
    shared_out, shared_lse, _ = emulate(**{**tensors, **several}, gpu=gpu)
    for b in range(8):
        assert_same_bits(out, shared_out[b : b + 1])
        assert_same_bits(lse, shared_lse[b : b + 1])


def test_chunks_of_queries_have_the_bits_of_all_at_once(call: Call) -> None:
    later = call.out.shape[1] - 1
    first = {"q": call.tensors["q"][:, :1].contiguous(), "lengths": call.tensors["lengths"] - later}
    out, lse, _ = emulate(**{**call.tensors, **first}, causal=True, gpu=call.gpu)
    some = [b for b, length in enumerate(call.tensors["lengths"].tolist()) if length > 1]
    assert_same_bits(call.out[some][:, :1], out[some])
    assert_same_bits(call.lse[some][:, :, :1], lse[some])


@pytest.mark.parametrize("lie", [-(2**31), -1, 7, 2**31 - 1])
@pytest.mark.parametrize("gpu", [AMPERE, HOPPER], ids=["8.0", "9.0"])
def test_wrong_numbers_read_nothing_outside(lie: int, gpu: Gpu) -> None:
    """The emulator fails if a copy is outside of all tensors."""
    tensors = Problem((64, 64), heads=48).make()
    table = torch.full((2, 3), lie, dtype=torch.int32)
    pages = tensors["k"].reshape(8, 16, 1, HEAD_DIM)
    for lengths in (tensors["lengths"], torch.full_like(tensors["lengths"], lie)):
        emulate(**{**tensors, "k": pages, "lengths": lengths}, table=table, gpu=gpu)


def test_what_the_kernels_do_not_serve_is_said() -> None:
    problem = Problem((64,), values_in_keys=False)
    with pytest.raises(RuntimeError, match="values must be the first columns of the keys"):
        emulate(**problem.make())


@pytest.mark.parametrize("heads", [17, 130])
@pytest.mark.parametrize("gpu", [HOPPER, WHOLE, PAIRS], ids=["9.0", "without room", "in pairs"])
def test_a_single_key_gives_its_value(heads: int, gpu: Gpu) -> None:
    tensors = Problem((1, 64, 129, 1, 3), heads).make()
    out, _, _ = emulate(**tensors, gpu=gpu)
    for b in (0, 3):
        assert torch.equal(out[b], tensors["k"][b, :1, :, :HEAD_DIM_V].expand_as(out[b]))
