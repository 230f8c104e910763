"""Where the time of a small call goes: its steps one by one, in microseconds of the CPU.

`python -m flash_dist bench --shapes overhead` holds whole calls against torch's. Each step here is
the median of loops in which nothing else happens, so that caches are warm: together they take a
little less than a call does.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from flash_dist import BlockMask, flash_attn_func
from flash_dist.attention.arguments import choose_mask, choose_scale, prepare_inputs
from flash_dist.attention.autograd import attend
from flash_dist.kernels.budget import workspace_budget
from flash_dist.kernels.cpu import shape_of
from flash_dist.kernels.operators import NOT_PACKED, fwd_alone
from flash_dist.masks import Band, registry

if TYPE_CHECKING:
    from collections.abc import Callable

    Step = Callable[[], object]

SIZE = (1, 128, 4, 64)
SCALE = SIZE[-1] ** -0.5
LOOPS, CALLS = 15, 200


def time_step(step: Step) -> float:
    """Return the microseconds of CPU time until a step returns."""
    times = []
    for _ in range(LOOPS + 1):  # the first warms up
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            step()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return statistics.median(times[1:])


def list_steps() -> dict[str, Step]:
    """Return the steps of a call, and what contains them."""
    q, k, v, dout = torch.randn(4, *SIZE, dtype=torch.bfloat16, device="cuda").unbind()
    leaves = q_leaf, k_leaf, v_leaf = [x.detach().requires_grad_() for x in (q, k, v)]
    none, band = q[:, :0], Band()
    mask = BlockMask.block_causal(torch.arange(SIZE[1]) // 16)
    shape = shape_of(q, k)
    out = flash_attn_func(q_leaf, k_leaf, v_leaf)
    product = q_leaf * 2
    operands = torch.tensor(band.ints), None, SCALE, False
    ops = torch.ops.flash_dist
    more = None, band.ints, *NOT_PACKED, SCALE, False

    def differentiate(result: torch.Tensor, *inputs: torch.Tensor) -> object:
        return torch.autograd.grad(result, inputs, dout, retain_graph=True)

    return {
        "layouts and addresses": lambda: prepare_inputs(q, k, v),
        "mask and scale": lambda: (
            choose_mask(None, (-1, -1), causal=False),
            choose_scale(None, SIZE[-1]),
        ),
        "budget": workspace_budget,
        "arrays of a BlockMask": lambda: registry.resident(mask.handle, q.device, shape),
        "operator on no queries: dispatcher, binding, outputs": lambda: ops.fwd_alone(
            none, k, v, *operands
        ),
        "operator": lambda: ops.fwd_alone(q, k, v, *operands),
        "operator with a formula": lambda: ops.fwd(q, k, v, *more),
        "fwd_alone": lambda: fwd_alone(q, k, v, band, None, SCALE, False),  # noqa: FBT003
        "attend": lambda: attend(q, k, v, mask=band, softmax_scale=SCALE),
        "flash_attn_func": lambda: flash_attn_func(q, k, v),
        "flash_attn_func, BlockMask": lambda: flash_attn_func(q, k, v, mask=mask),
        "flash_attn_func, gradients": lambda: flash_attn_func(q_leaf, k_leaf, v_leaf),
        "backward": lambda: differentiate(out, *leaves),
        "backward of a product, for its way to autograd's thread": lambda: differentiate(
            product, q_leaf
        ),
    }


def main() -> None:
    """Print a line per step."""
    for name, step in list_steps().items():
        print(f"{time_step(step):8.2f} us  {name}")


if __name__ == "__main__":
    main()
