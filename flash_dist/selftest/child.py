"""Child process of the selftest: run the kernels of one device and report every difference.

    python -m flash_dist.selftest.child --device 0 --runs 30 --report FILE

Before each run the free memory of torch's allocator is filled with NaN, so that a kernel that
reads what it did not write is caught.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ExtensionError, FlashDistError
from ..findings.proofs import SELFTEST_BITS_DIFFER, SELFTEST_VALUES_DIFFER
from ..loading.process import end_with, write_event
from ..targets.verdict import size_of_role
from .cases import Case, Kernels, make_cases
from .comparison import (
    Difference,
    Tensors,
    all_equal,
    compare_bits,
    compare_values,
    digest,
)
from .dirty_memory import DirtyMemory
from .exact import ExactValues
from .inputs import Attention, Inputs, load_attention

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ..findings.entry import Entry

    Emit = Callable[[dict[str, Any]], None]

CPU_KERNELS = (Kernels("fp16", 64, 64), Kernels("bf16", 128, 128), Kernels("fp32", 64, 64))

ALONE = ExactValues()  # shared with no other process

_TESTED = ("fwd", "mla")  # roles with cases of each of their sizes
_OTHER_WORK = 4096  # rows and columns of a product that occupies the GPU for a while


def run_case(  # noqa: PLR0913, PLR0917 - what is run, where, how often, and held against what
    case: Case,
    attention: Attention,
    device: torch.device,
    runs: int,
    emit: Emit,
    exact: ExactValues = ALONE,
) -> None:
    """Check the values once and the bits in every run, on two streams at the same time."""
    inputs = Inputs.make(case, device)
    memory = DirtyMemory(device)
    memory.fill()
    first = inputs.attend(attention, case)
    synchronize(device)
    emit({"event": "fingerprint", "case": case.name, **case.key(), "digests": digest(first)})
    for difference in check_values(case, first, exact):
        emit(_finding(SELFTEST_VALUES_DIFFER, case, difference, run=0))
    streams = make_streams(device)
    differing: list[dict[str, Any]] = []
    bad_runs = 0
    for run in range(1, runs):
        if run % 2:
            start_other_work(device)
        results = repeat(case, inputs, attention, memory, streams)
        synchronize(device)
        found = [] if all_equal(first, results) else list(find_differences(first, results))
        bad_runs += bool(found)
        differing = differing or [
            _finding(SELFTEST_BITS_DIFFER, case, difference, run=run, stream=stream)
            for stream, difference in found
        ]
    for finding in differing:
        emit({**finding, "bad_runs": bad_runs, "runs": runs})


def check_values(case: Case, actual: Tensors, exact: ExactValues) -> tuple[Difference, ...]:
    """Compare with float64 where that is quick; elsewhere there must at least be no NaN."""
    if case.fills_gpu:
        found = (_find_not_finite(name, values) for name, values in actual.items())
        return tuple(difference for difference in found if difference)
    right = exact.get(case)
    return compare_values(right.values, right.allowed, actual)


def _find_not_finite(name: str, values: torch.Tensor) -> Difference | None:
    wrong = ~torch.isfinite(values)
    if not wrong.any():
        return None
    where = tuple(int(axis) for axis in wrong.nonzero()[0])
    count = int(wrong.sum())
    return Difference(name, where, 0.0, float(values[where]), count, wrong.numel())


def repeat(
    case: Case,
    inputs: Inputs,
    attention: Attention,
    memory: DirtyMemory,
    streams: tuple[Any, ...],
) -> list[Tensors]:
    """Run once per stream at the same time, over poisoned memory."""
    for stream in streams:
        with stream:
            memory.fill()
    results = []
    for stream in streams:
        with stream:
            results.append(inputs.attend(attention, case))
    return results


def find_differences(first: Tensors, results: list[Tensors]) -> Iterator[tuple[int, Difference]]:
    """Yield what differs from the first run, with the number of the stream."""
    for number, result in enumerate(results):
        for difference in compare_bits(first, result):
            yield number, difference


def start_other_work(device: torch.device) -> None:
    """Let the GPU compute something else before and beside the next run."""
    if device.type == "cuda":
        other = torch.full((_OTHER_WORK, _OTHER_WORK), 0.5, dtype=torch.float16, device=device)
        other @ other


def _finding(
    entry: Entry, case: Case, difference: Difference, *, run: int, stream: int = 0
) -> dict[str, Any]:
    return {
        "event": "finding",
        "id": entry.id,
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


def find_kernels(selected: Iterable[dict[str, Any]]) -> tuple[Kernels, ...]:
    """Return the sizes of forward and latent keys for which every role has a kernel that loads."""
    loads: defaultdict[tuple[str, str], dict[tuple[int, int], bool]] = defaultdict(dict)
    for kernel in selected:
        size = int(kernel["head_dim"]), int(kernel["head_dim_v"])
        loads[str(kernel["role"]), str(kernel["dtype"])][size] = kernel["chosen"] is not None

    def is_usable(dtype: str, head_dims: tuple[int, int]) -> bool:
        sizes = (
            (built, size_of_role(role, built, head_dims))
            for (role, its_dtype), built in loads.items()
            if its_dtype == dtype
        )
        return all(built[size] for built, size in sizes if size is not None)

    tested = (
        Kernels(dtype, *head_dims)
        for (role, dtype), built in loads.items()
        if role in _TESTED
        for head_dims in built
        if is_usable(dtype, head_dims)
    )
    return tuple(sorted(tested))


def run_device(name: str, runs: int, emit: Emit, exact: ExactValues = ALONE) -> None:
    """Run every case on one device and report as it goes."""
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))
    attention = load_attention()
    emit({"event": "imported"})
    kernels: tuple[Kernels, ...] = CPU_KERNELS
    sm_count = 0
    if device.type == "cuda":
        torch.cuda.set_device(device)
        kernels, sm_count = _ask_device(device, emit)
    run_cases(make_cases(kernels, sm_count), device, runs, emit, attention, exact)


def run_cases(  # noqa: PLR0913, PLR0917 - as run_case
    cases: Sequence[Case],
    device: torch.device,
    runs: int,
    emit: Emit,
    attention: Attention,
    exact: ExactValues = ALONE,
) -> None:
    """Run cases on one device and report as it goes.

    Raises:
        ExtensionError: There is none.
    """
    if not cases:
        message = "the dispatcher has no complete set of kernels for this device"
        raise ExtensionError(message)
    emit({"event": "start", "cases": len(cases), "runs": runs, "torch": torch.__version__})
    for case in cases:
        emit({"event": "case", "case": case.name})
        started = time.monotonic()
        run_case(case, attention, device, runs, emit, exact)
        emit({"event": "case-done", "case": case.name, "seconds": time.monotonic() - started})
        if device.type == "cuda":
            emit({"event": "loaded", "variants": _last_variants()})
    emit({"event": "done"})


def _ask_device(device: torch.device, emit: Emit) -> tuple[tuple[Kernels, ...], int]:
    """Ask the dispatcher which kernels it has for the device."""
    from ..kernels.library import select  # noqa: PLC0415 - not needed on the CPU

    selected = [dict(kernel) for kernel in select(device.index)]
    emit({"event": "selected", "kernels": selected})
    properties = torch.cuda.get_device_properties(device)
    return find_kernels(selected), properties.multi_processor_count


def _last_variants() -> dict[str, Any]:
    from ..kernels.library import last_variant  # noqa: PLC0415 - not needed on the CPU

    return dict(last_variant())


def main() -> None:
    """Run as a process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", required=True)
    parser.add_argument("--runs", type=int, required=True)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--parent", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--exact", type=Path)
    arguments = parser.parse_args()
    end_with(arguments.parent)
    if arguments.threads:
        torch.set_num_threads(min(arguments.threads, torch.get_num_threads()))

    def emit(event: dict[str, Any]) -> None:
        write_event(arguments.report, event)

    try:
        run_device(arguments.device, arguments.runs, emit, ExactValues(arguments.exact))
    except Exception as error:  # noqa: BLE001 - any failure is the finding
        text = f"{type(error).__name__}: {error}"
        reason = error.message if isinstance(error, FlashDistError) else text
        emit({"event": "error", "reason": reason})


if __name__ == "__main__":
    main()
