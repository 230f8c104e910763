"""Attention of DTensors on several processes, compared with attention in one process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from flash_dist import BlockMask, IntervalMask, flash_attn_func, flash_attn_varlen_func
from flash_dist.kernels import operators  # noqa: F401 - registers the operators

Tensor = torch.Tensor
Run = Callable[[Callable[[], None], int], None]
BATCH, HEADS, WHOLE = Shard(0), Shard(2), Replicate()
ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 1.0])
DOCUMENTS = [0, 0, 0, 1, 1, 1, 1]

# Mesh, placements of q, and changes of the base case: batch 2, 4 heads, 2 kv heads.
CASES: dict[str, tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]] = {
    "batch": ((2,), (BATCH,), {}),
    "batch of 3": ((2,), (BATCH,), {"batch": 3}),
    "heads": ((2,), (HEADS,), {}),
    "heads, five axes": ((2,), (HEADS,), {"grouped": True}),
    "neither": ((2,), (WHOLE,), {}),
    "keys everywhere": ((2,), (HEADS,), {"placements_k": (WHOLE,)}),
    "both": ((2, 2), (BATCH, HEADS), {}),
    "heads twice": ((2, 2), (HEADS, HEADS), {"heads_k": 4}),
    "scores": (
        (2, 2),
        (BATCH, HEADS),
        {"softcap": 2.0, "alibi_slopes": torch.stack([SLOPES, SLOPES * 2]), "sinks": True},
    ),
    "sinks of a batch": ((2,), (BATCH,), {"sinks": True, "alibi_slopes": SLOPES}),
    "block mask": ((2, 2), (BATCH, HEADS), {"mask": DOCUMENTS}),
    "mask of a batch": ((2,), (BATCH,), {"batch": 3, "mask": [7, 3, 5]}),
    "mask of a batch and its heads": ((2, 2), (HEADS, BATCH), {"mask": [7, 3], "masked_heads": 4}),
    "interval mask": ((2, 2), (BATCH, HEADS), {"lo": [0, 0, 0, 0, 0, 3, 3]}),
    "packed": ((2,), (Shard(1),), {"packed": True}),
    "packed, heads twice": ((2, 2), (Shard(1), Shard(1)), {"packed": True, "heads_k": 4}),
    "packed scores": (
        (2,),
        (Shard(1),),
        {"packed": True, "alibi_slopes": SLOPES, "sinks": True},
    ),
}


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inputs_of(case: dict[str, Any]) -> list[Tensor]:
    """Return q, k, v and maybe sinks; remove the entries of the case that describe them."""
    heads, heads_k, packed = 4, case.pop("heads_k", 2), case.pop("packed", False)
    batch = () if packed else (case.pop("batch", 2),)
    q, k = draw(*batch, 9 - 2 * (not packed), heads, 16), draw(*batch, 9, heads_k, 16)
    if "mask" in case or "lo" in case:
        k = k[:, :7]
    v = k.flip(-1)[..., :8].contiguous()
    q = q.unflatten(2, (heads_k, -1)) if case.pop("grouped", False) else q
    return [q, k, v, *([draw(heads)] if case.pop("sinks", False) else [])]


def call(tensors: list[Any], case: dict[str, Any]) -> tuple[Any, Any]:
    q, k, v, *sinks = tensors
    options: dict[str, Any] = dict(
        case, return_lse=True, **({"learnable_sink": sinks[0]} if sinks else {})
    )
    if q.dim() == 3:
        mesh = getattr(q, "device_mesh", None) if sinks else None
        ends = ENDS if mesh is None else distribute_tensor(ENDS, mesh, [WHOLE])
        found = flash_attn_varlen_func(q, k, v, ends, ENDS, 5, 5, causal=True, **options)
        return found[0], found[1]
    if "mask" in options:
        numbers, heads = options.pop("mask"), options.pop("masked_heads", 1)
        options["mask"] = BlockMask.documents(numbers)
        if len(numbers) < 7:
            mask = torch.arange(k.shape[1]) < torch.tensor(numbers)[:, None, None, None]
            late = torch.arange(7)[:, None] >= torch.arange(heads)[:, None, None]
            options["mask"] = BlockMask.from_dense(mask & late)
    elif "lo" in options:
        lo = torch.tensor(options.pop("lo"))
        options["mask"] = IntervalMask.of(lo, lo + 4, seqlen_k=k.shape[1])
    else:
        options["causal"] = True
    found = flash_attn_func(q, k, v, **options)
    return found[0], found[1]


def compare(mesh_shape: tuple[int, ...], placements: tuple[Any, ...], case: dict[str, Any]) -> None:
    """Compare a sharded call with a call of whole tensors, forward and backward."""
    case = dict(case)
    mesh = init_device_mesh("cpu", mesh_shape)
    of_keys = case.pop("placements_k", placements)
    whole = [x.requires_grad_() for x in inputs_of(case)]
    out, lse = call(whole, case)
    dout, dlse = draw(*out.shape), draw(*lse.shape)
    want = [out, lse, *torch.autograd.grad((out, lse), whole, (dout, dlse))]

    everywhere = [WHOLE] * mesh.ndim
    places = [placements, of_keys, of_keys, everywhere]
    given = [
        distribute_tensor(x.detach(), mesh, place).requires_grad_()
        for x, place in zip(whole, places, strict=False)
    ]
    with CommDebugMode() as sent:
        got_out, got_lse = call(given, case)
        assert tuple(got_out.placements) == placements
        above = (
            distribute_tensor(dout, mesh, got_out.placements),
            distribute_tensor(dlse, mesh, got_lse.placements),
        )
        sent_before = sent.get_total_counts()
        gradients = torch.autograd.grad((got_out, got_lse), given, above)
    assert sent.get_total_counts() in {sent_before, 2 * sent_before}  # of distribute_tensor
    for x, expected in zip([got_out, got_lse, *gradients], want, strict=True):
        assert x.shape == expected.shape
        assert x.stride() == expected.stride()
        torch.testing.assert_close(x.full_tensor(), expected.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_sharded_call_is_the_call_of_whole_tensors(
    run: Run, case: tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any]]
) -> None:
    run(partial(compare, *case), 2 if case[0] == (2,) else 4)


def mesh_of(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape)


def move_what_lies_elsewhere() -> None:
    """Pass a q of partial sums, and a gradient that is sharded along the tokens."""
    mesh = mesh_of(2)
    q, k, v = (x.requires_grad_() for x in inputs_of({}))
    want = flash_attn_func(q, k, v)
    dout = draw(*want.shape)
    expected = torch.autograd.grad(want, (q, k, v), dout)
    parts = [distribute_tensor(x.detach(), mesh, [HEADS]) for x in (q, k, v)]
    parts[0] = DTensor.from_local(q.detach() / 2, mesh, [Partial()])
    leaves = [x.detach().requires_grad_() for x in parts]
    out = cast("Any", flash_attn_func)(*leaves)
    torch.testing.assert_close(out.full_tensor(), want.detach())
    above = distribute_tensor(dout, mesh, [Shard(1)])
    gradients: Any = torch.autograd.grad(out, leaves, above)
    for got, one in zip(gradients, expected, strict=True):
        torch.testing.assert_close(got.full_tensor(), one)


def test_what_lies_elsewhere_is_moved(run: Run) -> None:
    run(move_what_lies_elsewhere, 2)


def compile_it() -> None:
    mesh = mesh_of(2)
    parts = [distribute_tensor(x, mesh, [HEADS]).requires_grad_() for x in inputs_of({})]

    def step(q: Any, k: Any, v: Any) -> Any:  # noqa: ANN401
        return flash_attn_func(q * 2, k, v, causal=True)

    want = step(*parts)
    dout = torch.ones_like(want)
    expected = torch.autograd.grad(want, parts, dout)
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(*parts)
    gradients = torch.autograd.grad(out, parts, dout)
    for got, one in zip((out, *gradients), (want, *expected), strict=True):
        assert tuple(got.placements) == (HEADS,)
        assert torch.equal(got.to_local(), one.to_local())


def test_a_compiled_function_takes_dtensors(run: Run) -> None:
    run(compile_it, 2)


def refuse() -> None:
    mesh, attend = mesh_of(2), cast("Any", flash_attn_func)
    q, k, v = inputs_of({})
    replicas = [distribute_tensor(x, mesh, [WHOLE]) for x in (q, k, v)]
    tokens = distribute_tensor(q[:, :6], mesh, [Shard(1)])
    with pytest.raises(ValueError, match=r"(?s)^q must not be .* tokens, got S.*`ring_attention`"):
        attend(tokens, *replicas[1:])
    with pytest.raises(ValueError, match=r"(?s)^k must not be sharded along its tokens.*hint: "):
        attend(replicas[0], replicas[1].redistribute(mesh, [Shard(1)]), replicas[2])
    columns = distribute_tensor(q, mesh, [Shard(3)])
    with pytest.raises(ValueError, match=r"(?s)^q must be Shard\(0\) .batch., Shard\(2\) .*hint: "):
        attend(columns, *replicas[1:])
    with pytest.raises(ValueError, match=r"(?s)must be sharded alike, got .*'batch'.*hint: "):
        attend(
            replicas[0].redistribute(mesh, [BATCH]),
            replicas[1].redistribute(mesh, [HEADS]),
            replicas[2],
        )
    three, six = (distribute_tensor(draw(2, 9, n, 16), mesh, [HEADS]) for n in (3, 6))
    with pytest.raises(ValueError, match=r"(?s)num_heads_kv must be .*of 2, .*got 3.*hint: "):
        attend(six, three, three)
    with pytest.raises(TypeError, match=r"(?s)q and k must both be DTensors, got DTensor and Tens"):
        attend(replicas[0], k, replicas[2])
    with pytest.raises(TypeError, match="q and sinks must both be DTensors"):
        attend(*replicas, learnable_sink=draw(4))
    with pytest.raises(TypeError, match=r"dropout_p must be 0 for DTensors, got 0\.1"):
        attend(*replicas, dropout_p=0.1)
    shares = [x.redistribute(mesh, [BATCH]) for x in replicas]
    lo = torch.tensor([[0] * 7, [2] * 7])
    mask = IntervalMask.of(lo, lo + 4, seqlen_k=9)
    with pytest.raises(ValueError, match=r"(?s)same for all batch entries .* for 2.*local_map"):
        attend(*shares, mask=mask)
    out = attend(*(x.redistribute(mesh, [HEADS]) for x in replicas), mask=mask)
    torch.testing.assert_close(out.full_tensor(), attend(q, k, v, mask=mask))
    packed = distribute_tensor(draw(9, 4, 16), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"^q must not be sharded along its tokens"):
        flash_attn_varlen_func(packed, packed, packed, ENDS, ENDS, 5, 5)
    with pytest.raises(TypeError, match=r"(?s)attention_max_logit` must have .*this rank.*`to_loc"):
        attend(*replicas, return_max_logit=True)
    cache = torch.ops.flash_dist.decode_no_lse
    with pytest.raises(TypeError, match=r"(?s)decode_no_lse` must have .*this rank.*`to_local"):
        cache(*replicas, None, None, 0.25, -1, -1, 0, 0)


def test_what_has_no_sharding_is_refused_in_words(run: Run) -> None:
    run(refuse, 2)


EITHER_ORDER = """
import sys, torch
{first}
from flash_dist.kernels import operators
assert ("torch.distributed.tensor" in sys.modules) is {loaded}
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
q = DTensor.from_local(torch.ones(1, 2, 1, 8), init_device_mesh("cpu", (1,)), [Shard(2)])
out, lse = torch.ops.flash_dist.attention(q, q, q, None, [0, -1, -1, 1], None, None, 0, 0, 1.0)
assert type(lse) is DTensor and lse.placements == (Shard(1),), lse
dist.destroy_process_group()
"""


@pytest.mark.parametrize("first", ["", "import torch.distributed.tensor"], ids=["ours", "torch's"])
def test_either_may_be_imported_first(first: str) -> None:
    code = EITHER_ORDER.format(first=first, loaded=bool(first))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
