"""Child process of the selftest: run the kernels of one device and report every difference.

    python -m flash_dist.selftest_child --device 0 --runs 30 --report FILE

Before each run the free memory of torch's allocator is filled with NaN, so that a kernel that
reads what it did not write is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from .child import write_event
from .comparison import (
    NAMES,
    Difference,
    Tensors,
    attend,
    compare_bits,
    compare_values,
    make_values,
)
from .errors import ExtensionError, FlashDistError
from .selftest_cases import Case, Kernels, make_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    Emit = Callable[[dict[str, Any]], None]

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
CPU_KERNELS = (Kernels("fp16", 64, 64), Kernels("bf16", 128, 128), Kernels("fp32", 64, 64))

_Q_SCALE = 4.0  # spreads the scores, so that softmax is not flat
_NAN_BYTE = 0xFF  # NaN in float16, bfloat16 and float32


class Attention(Protocol):
    """What is tested; `flash_attn_func`."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        causal: bool,
        return_lse: bool,
    ) -> Any:  # noqa: ANN401 - tuple with return_lse
        """Return (out, lse)."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of one case."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor

    @classmethod
    def make(cls, case: Case, device: torch.device) -> Inputs:
        """Fill them from the integer hash, each with a seed of its own."""
        dtype = DTYPES[case.dtype]
        return cls(
            make_values(1, case.q_shape, dtype, device=device, scale=_Q_SCALE),
            make_values(2, case.k_shape, dtype, device=device),
            make_values(3, case.v_shape, dtype, device=device),
            make_values(4, case.out_shape, dtype, device=device),
        )

    def attend(self, attention: Attention, case: Case) -> Tensors:
        """Run forward and backward once."""
        if case.budget is not None:
            return self._attend_within(case.budget, case)
        q, k, v = (x.detach().requires_grad_() for x in (self.q, self.k, self.v))
        out, lse = attention(q, k, v, causal=case.causal, return_lse=True)
        gradients = torch.autograd.grad(out, (q, k, v), self.dout)
        values = (out.detach(), lse.detach(), *gradients)
        return dict(zip(NAMES, values, strict=True))

    def _attend_within(self, budget: int, case: Case) -> Tensors:
        """Call the operators themselves, which take the workspace budget."""
        from . import _ops  # noqa: PLC0415 - absent on a broken install
        from .masks import Band  # noqa: PLC0415

        q, k, v = self.q, self.k, self.v
        mask = Band(right=0) if case.causal else Band()
        scale = case.head_dim**-0.5
        out, lse = _ops.fwd(q, k, v, mask=mask, packing=None, softmax_scale=scale)
        gradients = _ops.bwd(
            self.dout,
            q,
            k,
            v,
            out,
            lse,
            None,
            mask=mask,
            packing=None,
            softmax_scale=scale,
            budget=budget,
            batch_invariant=False,
        )
        return dict(zip(NAMES, (out, lse, *gradients), strict=True))


def run_case(case: Case, attention: Attention, device: torch.device, runs: int, emit: Emit) -> None:
    """Check the values once and the bits in every run, on two streams at the same time."""
    inputs = Inputs.make(case, device)
    poison_memory(device)
    first = inputs.attend(attention, case)
    synchronize(device)
    for difference in check_values(case, inputs, first):
        emit(_finding("values-differ", case, difference, run=0))
    streams = make_streams(device)
    differing: list[dict[str, Any]] = []
    bad_runs = 0
    for run in range(1, runs):
        found = list(compare_run(case, inputs, attention, first, streams, device))
        bad_runs += bool(found)
        differing = differing or [
            _finding("bits-differ", case, difference, run=run, stream=stream)
            for stream, difference in found
        ]
    for finding in differing:
        emit({**finding, "bad_runs": bad_runs, "runs": runs})


def check_values(case: Case, inputs: Inputs, actual: Tensors) -> tuple[Difference, ...]:
    """Compare with float64 where that is quick; elsewhere there must at least be no NaN."""
    if case.fills_gpu:
        found = (_find_not_finite(name, actual[name]) for name in NAMES)
        return tuple(difference for difference in found if difference)
    tensors = (inputs.q, inputs.k, inputs.v, inputs.dout)
    exact = attend(*tensors, causal=case.causal, dtype=torch.float64)
    baseline = attend(*tensors, causal=case.causal, dtype=DTYPES[case.dtype])
    return compare_values(exact, baseline, actual)


def _find_not_finite(name: str, values: torch.Tensor) -> Difference | None:
    wrong = ~torch.isfinite(values)
    if not wrong.any():
        return None
    where = tuple(int(axis) for axis in wrong.nonzero()[0])
    count = int(wrong.sum())
    return Difference(name, where, 0.0, float(values[where]), count, wrong.numel())


def compare_run(  # noqa: PLR0913, PLR0917 - what one run is made of
    case: Case,
    inputs: Inputs,
    attention: Attention,
    first: Tensors,
    streams: tuple[Any, ...],
    device: torch.device,
) -> Iterator[tuple[int, Difference]]:
    """Run once per stream at the same time, over poisoned memory, and yield what differs."""
    for stream in streams:
        with stream:
            poison_memory(device)
    synchronize(device)
    results = []
    for stream in streams:
        with stream:
            results.append(inputs.attend(attention, case))
    synchronize(device)
    for number, result in enumerate(results):
        for difference in compare_bits(first, result):
            yield number, difference


def _finding(
    cause: str, case: Case, difference: Difference, *, run: int, stream: int = 0
) -> dict[str, Any]:
    return {
        "event": "finding",
        "id": f"selftest-{cause}",
        "case": case.name,
        "run": run,
        "stream": stream,
        "summary": str(difference),
        "difference": difference.to_json(),
    }


def make_streams(device: torch.device) -> tuple[Any, ...]:
    """Return two contexts that select a stream each; on the CPU one that does nothing."""
    if device.type != "cuda":
        return (contextlib.nullcontext(),)
    cuda: Any = torch.cuda
    return tuple(cuda.stream(cuda.Stream(device)) for _ in range(2))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def poison_memory(device: torch.device) -> None:
    """Fill the allocator's free blocks of the current stream with NaN.

    Takes a tensor of each free block's size, largest first, fills them and gives them back. A
    block that is too large to be handed out whole is split, which changes nothing here.
    """
    if device.type != "cuda":
        return
    synchronize(device)
    held = []
    for size in sorted(_free_blocks(device), reverse=True):
        block = torch.empty(size, dtype=torch.uint8, device=device)
        held.append(block.fill_(_NAN_BYTE))


def _free_blocks(device: torch.device) -> Iterator[int]:
    cuda: Any = torch.cuda
    stream = cuda.current_stream(device).cuda_stream
    for segment in cuda.memory_snapshot():
        if segment["device"] == device.index and segment["stream"] == stream:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    yield block["size"]


def find_kernels(selected: Iterable[dict[str, Any]]) -> tuple[Kernels, ...]:
    """Return the sizes of the forward for which every kernel family has a variant."""
    usable: dict[Kernels, bool] = {}
    forward: set[Kernels] = set()
    for kernel in selected:
        head_dims = int(kernel["head_dim"]), int(kernel["head_dim_v"])
        key = Kernels(str(kernel["dtype"]), *head_dims)
        usable[key] = usable.get(key, True) and kernel["chosen"] is not None
        if kernel["family"] == "fwd":
            forward.add(key)
    return tuple(key for key in sorted(forward) if usable[key])


def run_device(
    name: str,
    runs: int,
    emit: Emit,
    attention: Attention | None = None,
) -> None:
    """Run every case on one device and report as it goes."""
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))
    attention = attention or _load_attention()
    emit({"event": "imported"})
    kernels: tuple[Kernels, ...] = CPU_KERNELS
    sm_count = 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        kernels, sm_count = _ask_device(device, emit)
    cases = make_cases(kernels, sm_count)
    if not cases:
        message = "the dispatcher has no complete set of kernels for this device"
        raise ExtensionError(message)
    emit({"event": "start", "cases": len(cases), "runs": runs, "torch": torch.__version__})
    for case in cases:
        emit({"event": "case", "case": case.name})
        started = time.monotonic()
        run_case(case, attention, device, runs, emit)
        emit({"event": "case-done", "case": case.name, "seconds": time.monotonic() - started})
        if device.type == "cuda":
            emit({"event": "loaded", "variants": _last_variants()})
    emit({"event": "done"})


def _ask_device(device: torch.device, emit: Emit) -> tuple[tuple[Kernels, ...], int]:
    """Ask the dispatcher which kernels it has for the device."""
    from ._native import select  # noqa: PLC0415 - not needed on the CPU

    selected = [dict(kernel) for kernel in select(device.index)]
    emit({"event": "selected", "kernels": selected})
    properties = torch.cuda.get_device_properties(device)
    return find_kernels(selected), properties.multi_processor_count


def _last_variants() -> dict[str, Any]:
    from ._native import last_variant  # noqa: PLC0415 - not needed on the CPU

    return dict(last_variant())


def _load_attention() -> Attention:
    from .attention import flash_attn_func  # noqa: PLC0415 - absent on a broken install

    return cast("Attention", flash_attn_func)


def main() -> None:
    """Run as a process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    arguments = parser.parse_args()

    def emit(event: dict[str, Any]) -> None:
        write_event(arguments.report, event)

    try:
        run_device(arguments.device, arguments.runs, emit)
    except Exception as error:  # noqa: BLE001 - any failure is the finding
        text = f"{type(error).__name__}: {error}"
        reason = error.message if isinstance(error, FlashDistError) else text
        emit({"event": "error", "reason": reason})


if __name__ == "__main__":
    main()
