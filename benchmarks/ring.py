"""One sequence over 1, 2 and more GPUs: time and memory of ring_attention, beside torch's ring.

    torchrun --standalone --nproc-per-node 4 benchmarks/ring.py [--json FILE]

Forward and backward of ring_attention, on one GPU of flash_attn_func, and of torch's
context_parallel with these kernels and with its own (FLASH, not deterministic). Causal, bfloat16,
head_dim 128, batch 1; --documents N packs N unequal ones into a sequence. A time is from CUDA
events, the median of as many runs as fit into --seconds, but one at least. The forward's is the
slowest rank's; the backward's is the rest of the largest time of both.
Memory is the peak of torch's allocator on the fullest GPU. Groups of fewer GPUs than there are run
at the same time, each on its own GPUs. Prints a line for each, and writes the file after each
sequence. With --device cpu it tries the program itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flash_dist import flash_attn_func, ring_attention, ring_shard
from flash_dist.bench.runner import describe_machine
from flash_dist.integrations import torch_sdpa
from flash_dist.masks import IntervalMask

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed import ProcessGroup

NO_RANK = "error: nothing was measured: torchrun, which tells a process its rank, did not start it"
NO_GPU = "error: nothing was measured: torch sees no GPU here\n\nhint: "
HINT = "`torchrun --standalone --nproc-per-node=gpu benchmarks/ring.py`"
Tensor = torch.Tensor

HEAD_DIM: Final = 128
RING: Final = "ring_attention"
TORCHS_RING: Final = "context_parallel"
MOST_RUNS: Final = 10
CYCLES: Final = 20_000_000  # 10 ms of a GPU, so that launches are not what is timed


@dataclass(frozen=True)
class Row:
    """One attention of one sequence on some GPUs."""

    attention: str
    gpus: int
    seqlen: int
    num_heads: int
    num_heads_kv: int
    documents: int
    forward_ms: float
    backward_ms: float
    peak_gib: float
    runs: int

    def __str__(self) -> str:
        heads = f"{self.num_heads}/{self.num_heads_kv} heads"
        times = f"forward {self.forward_ms:.2f} ms, backward {self.backward_ms:.2f} ms"
        return (
            f"{self.seqlen} tokens in {self.documents}, {heads}, {self.gpus} x GPU, "
            f"{self.attention}: {times}, {self.peak_gib:.2f} GiB, {self.runs} runs"
        )


@dataclass(frozen=True)
class Group:
    """Some of the ranks, this one among them."""

    ranks: tuple[int, ...]
    group: ProcessGroup
    device: torch.device

    @property
    def size(self) -> int:
        """Number of GPUs."""
        return len(self.ranks)

    def find_largest(self, *values: float) -> list[float]:
        """Return the largest of each value over the ranks."""
        together = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(together, dist.ReduceOp.MAX, self.group)
        return together.tolist()  # type: ignore[no-any-return]


class Stopwatch:
    """Time since the last lap, of a GPU by its own clock."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._laps: list[Any] = []
        if self._events:
            torch.cuda._sleep(CYCLES)  # noqa: SLF001 - nothing public waits on the GPU
        self.lap()

    def lap(self) -> None:
        """End a lap."""
        if self._events:
            self._laps.append(torch.cuda.Event(enable_timing=True))
            self._laps[-1].record()
        else:
            self._laps.append(time.perf_counter())

    def read(self) -> list[float]:
        """Return the milliseconds of each lap."""
        if self._events:
            torch.cuda.synchronize()
        pairs = zip(self._laps, self._laps[1:], strict=False)
        return [a.elapsed_time(b) if self._events else 1e3 * (b - a) for a, b in pairs]


def make_groups(sizes: Sequence[int], device: torch.device) -> dict[int, Group | None]:
    """Return the group of each size, None without this rank; few GPUs get groups of their own."""
    rank, world = dist.get_rank(), dist.get_world_size()
    groups: dict[int, Group | None] = {}
    first = 0
    for size in sorted(sizes, reverse=True):
        first = first if first + size <= world else 0
        ranks = tuple(range(first, first + size))
        first += size if size < world else 0
        group = dist.new_group(list(ranks))
        groups[size] = Group(ranks, group, device) if rank in ranks else None
    return dict(sorted(groups.items()))


def draw_documents(seqlen: int, count: int) -> Tensor:
    """Return the first token of each token's document; lengths differ by a factor of up to 10."""
    generator = torch.Generator().manual_seed(count)
    ends = torch.randint(1, 11, (count,), generator=generator).cumsum(0)
    numbers = torch.arange(seqlen)
    begins = torch.cat([numbers[:1], ends[:-1] * seqlen // int(ends[-1])])
    return begins[torch.searchsorted(begins, numbers, right=True) - 1]


def attend_by_ring(
    q: Tensor, k: Tensor, v: Tensor, group: Group, first_key: Tensor | None = None
) -> Tensor:
    """Attention of ring_attention, and of flash_attn_func on one GPU."""
    if group.size > 1:
        return ring_attention(q, k, v, group=group.group, causal=True, first_key=first_key)
    if first_key is None:
        return flash_attn_func(q, k, v, causal=True)
    ends = torch.arange(1, q.shape[1] + 1, device=q.device)
    mask = IntervalMask.of(first_key, ends, seqlen_k=q.shape[1], causal=True)
    return flash_attn_func(q, k, v, mask=mask)


def attend_by_torch(q: Tensor, k: Tensor, v: Tensor, _group: Group) -> Tensor:
    """Attention of SDPA, under context_parallel that of its ring; its layout is [b, h, s, d]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # it replaces this name
    return out.transpose(1, 2)


@contextmanager
def running_torchs_ring(group: Group, *, ours: bool) -> Iterator[None]:
    """Let SDPA be torch's ring over a group, with our kernels or with torch's."""
    mesh = DeviceMesh.from_group(group.group, group.device.type)
    positions = torch.arange(2 * group.size, device=group.device)  # it shards one tensor at least
    if ours:
        torch_sdpa.activate()
    try:
        sharding = context_parallel(mesh, buffers=[positions], buffer_seq_dims=[0])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), sharding:
            yield
    finally:
        if ours:
            torch_sdpa.deactivate()


def measure(
    attend: Callable[[Tensor, Tensor, Tensor, Group], Tensor],
    tensors: Sequence[Tensor],
    group: Group,
    seconds: float,
) -> tuple[float, float, float, int]:
    """Return milliseconds of forward and backward, the peak of memory in GiB, and the runs.

    Args:
        attend: Takes q, k and v of this rank.
        tensors: q, k, v and dout of this rank.
        group: The ranks.
        seconds: Time for all runs but the first, which counts only if it was longer.
    """
    *leaves, dout = tensors
    times: list[list[float]] = []
    peak = 0.0
    count = 1
    while len(times) < count:
        if group.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        group.find_largest(0.0)  # all begin together
        watch = Stopwatch(group.device)
        out = attend(*leaves, group)
        watch.lap()
        grads = torch.autograd.grad(out, leaves, dout)
        watch.lap()
        del out, grads
        peak = float(torch.cuda.max_memory_allocated()) if group.device.type == "cuda" else 0.0
        forward, backward = watch.read()
        forward, both, peak = group.find_largest(forward, forward + backward, peak)
        backward = both - forward  # a rank that is done early waits in its backward
        times.append([forward, backward])
        if len(times) == 1:
            count += min(MOST_RUNS, int(1e3 * seconds / (forward + backward)))
    kept = times[1:] or times
    forward, backward = (statistics.median(column) for column in zip(*kept, strict=True))
    return forward, backward, peak / 2**30, len(kept)


def measure_rows(
    seqlen: int, heads: tuple[int, int], group: Group, args: argparse.Namespace
) -> list[Row]:
    """Measure all attentions of a sequence on a group."""
    shape = (seqlen, *heads, args.documents)
    first_key = None
    if args.documents > 1:
        first_key = draw_documents(seqlen, args.documents).to(group.device)
        first_key = ring_shard(first_key, group.group, dim=0)
    attend = partial(attend_by_ring, first_key=first_key)
    generator = torch.Generator(group.device).manual_seed(dist.get_rank())
    dtype = torch.bfloat16 if group.device.type == "cuda" else torch.float32
    num_heads, num_heads_kv = heads
    tensors = [
        torch.randn(
            *(1, seqlen // group.size, count, HEAD_DIM),
            generator=generator,
            device=group.device,
            dtype=dtype,
            requires_grad=place < 3,  # noqa: PLR2004 - dout has none
        )
        for place, count in enumerate((num_heads, num_heads_kv, num_heads_kv, num_heads))
    ]
    rows = [Row(RING, group.size, *shape, *measure(attend, tensors, group, args.seconds))]
    is_served = group.size > 1 and num_heads == num_heads_kv and first_key is None
    for ours in (True, False) if is_served and not args.alone else ():
        name = TORCHS_RING if ours else f"{TORCHS_RING}, torch's kernels"
        try:
            with running_torchs_ring(group, ours=ours):
                found = measure(attend_by_torch, tensors, group, args.seconds)
        except Exception as error:  # noqa: BLE001 - torch refuses by many kinds
            print(f"{name} on {group.size} GPUs: {error!r:.300}", file=sys.stderr)
        else:
            rows.append(Row(name, group.size, *shape, *found))
    return rows


def measure_all(
    args: argparse.Namespace, groups: dict[int, Group | None], keep: Callable[[list[Row]], None]
) -> None:
    """Measure every sequence on every group that has memory for it; rank 0 keeps the rows."""
    for heads in args.heads:
        for seqlen in args.seqlen:
            mine: list[Row] = []
            for size, group in groups.items():
                if group is not None and seqlen % (2 * size) == 0:
                    rows = measure_rows(seqlen, heads, group, args)
                    mine += rows if dist.get_rank() == group.ranks[0] else []
                    if group.device.type == "cuda":
                        torch.cuda.empty_cache()
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, mine)
            if dist.get_rank() == 0:
                keep([row for rows in everyone for row in rows])


def parse_heads(text: str) -> tuple[int, int]:
    """Read `32/8`."""
    num_heads, num_heads_kv = map(int, text.split("/"))
    return num_heads, num_heads_kv


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seqlen", type=int, nargs="+", default=[65536, 262144])
    parser.add_argument("--heads", type=parse_heads, nargs="+", default=[(16, 16), (32, 8)])
    parser.add_argument("--documents", type=int, default=1, help="in a sequence (default: 1)")
    parser.add_argument("--gpus", type=int, nargs="+", help="sizes of groups (default: 1, 2, 4 ..)")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each (default: 2)")
    parser.add_argument("--alone", action="store_true", help="leave out torch's context_parallel")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{NO_GPU}`--device cpu --seqlen 512` tries the program")
    if "RANK" not in os.environ:
        sys.exit(f"{NO_RANK}\n\nhint: {HINT}")
    device = torch.device(args.device, int(os.environ["LOCAL_RANK"]))
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    world = dist.get_world_size()
    sizes = args.gpus or [1 << power for power in range(world.bit_length())]
    machine, rows = describe_machine(device), list[Row]()

    def keep(found: list[Row]) -> None:
        print(*found, sep="\n", flush=True)
        rows.extend(found)
        if args.json:
            text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
            args.json.write_text(text + "\n", encoding="utf-8")

    if dist.get_rank() == 0:
        print(f"{world} x {machine['gpu']}, torch {machine['torch']}, {machine['date']}")
    measure_all(args, make_groups(sizes, device), keep)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
