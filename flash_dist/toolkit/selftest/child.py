"""Child process of the selftest: runs the kernels on one device, and reports differences.

    python -m PACKAGE.toolkit.selftest.child --device 0 --runs 30 --report FILE

Before each run the free memory of torch's allocator is filled with NaN, to catch kernels that read
memory they did not write.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ExtensionError, KernelsError
from ..findings.proofs import SELFTEST_BITS_DIFFER, SELFTEST_VALUES_DIFFER
from ..loading.library import last_variant, recorded_plans, select
from ..loading.process import end_with, write_event
from ..product import HAS_DISPATCHER, PRODUCT
from .comparison import (
    Difference,
    Tensors,
    all_equal,
    compare_bits,
    compare_values,
    digest,
    first_difference,
)
from .exact import ExactValues
from .report import CasePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..findings.entry import Entry
    from .case import Case, ChooseCases

    Emit = Callable[[dict[str, Any]], None]

ALONE = ExactValues()  # values that no other process shares

_NAN_BYTE = 0xFF  # NaN in float16, bfloat16 and float32
_SETTLED = 2  # calls after which the sizes of a stream's free blocks repeat
_OTHER_WORK = 4096  # rows and columns of a matrix product that keeps the GPU busy


class DirtyMemory:
    """Fills the free blocks of torch's allocator with NaN before each run of one case.

    Asking the allocator takes milliseconds, so each stream's block sizes are cached once they
    repeat.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._calls: dict[int, int] = {}
        if device.type == "cuda":
            torch.cuda.empty_cache()  # release the blocks of other cases

    def fill(self) -> None:
        """Fill the free blocks of the current stream.

        Allocates a tensor of each free block's size, largest first, fills all and frees them. A
        block that is too large to be allocated whole is split, which does no harm.
        """
        if self._device.type != "cuda":
            return
        cuda: Any = torch.cuda
        stream = int(cuda.current_stream(self._device).cuda_stream)
        calls = self._calls[stream] = self._calls.get(stream, 0) + 1
        if calls <= _SETTLED:
            torch.cuda.synchronize(self._device)
            blocks = sorted(_free_blocks(self._device, stream), reverse=True)
            self._sizes[stream] = tuple(blocks)
        held = []
        for size in self._sizes[stream]:
            block = torch.empty(size, dtype=torch.uint8, device=self._device)
            held.append(block.fill_(_NAN_BYTE))


def _free_blocks(device: torch.device, stream: int) -> Iterator[int]:
    cuda: Any = torch.cuda
    for segment in cuda.memory_snapshot():
        if segment["device"] == device.index and segment["stream"] == stream:
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    yield block["size"]


def run_case(
    case: Case, device: torch.device, runs: int, emit: Emit, exact: ExactValues = ALONE
) -> None:
    """Check the values of the first run, and the bits of further runs on two streams at a time."""
    inputs = case.make_inputs(device)
    memory = DirtyMemory(device)
    memory.fill()
    first, plan = run_first(case, inputs, device)
    synchronize(device)
    emit({"event": "fingerprint", "case": case.name, **plan.to_json(), "digests": digest(first)})
    for difference in check_values(case, first, exact):
        emit(_finding(SELFTEST_VALUES_DIFFER, case, difference, run=0))
    streams = make_streams(device)
    differing: list[dict[str, Any]] = []
    bad_runs = 0
    for run in range(1, runs):
        if run % 2:
            start_other_work(device)
        results = repeat(case, inputs, memory, streams)
        synchronize(device)
        found = [] if all_equal(first, results) else list(find_differences(first, results))
        bad_runs += bool(found)
        differing = differing or [
            _finding(SELFTEST_BITS_DIFFER, case, difference, run=run, stream=stream)
            for stream, difference in found
        ]
    for finding in differing:
        emit({**finding, "bad_runs": bad_runs, "runs": runs})


def run_first(
    case: Case,
    inputs: Any,  # noqa: ANN401 - the case's own
    device: torch.device,
) -> tuple[Tensors, CasePlan]:
    """Run the case once. Return its results and the plans of its launches; no plans on the CPU.

    Without a dispatcher the plan holds only the case's description of its inputs.
    """
    if device.type != "cuda":
        return case.run(inputs), CasePlan()
    with recorded_plans() if HAS_DISPATCHER else contextlib.nullcontext(()) as plans:
        results = case.run(inputs)
    return results, CasePlan.of(plans, case.describe_inputs(inputs))


def check_values(case: Case, actual: Tensors, exact: ExactValues) -> tuple[Difference, ...]:
    """Compare results with expected values; if the case fills the GPU, find only NaN and inf."""
    if case.fills_gpu:
        found = (
            first_difference(name, ~torch.isfinite(one), one.new_zeros(()).expand_as(one), one)
            for name, one in actual.items()
        )
        return tuple(filter(None, found))
    right = exact.get(case)
    return compare_values(right.values, right.allowed, actual)


def repeat(
    case: Case,
    inputs: Any,  # noqa: ANN401 - the case's own
    memory: DirtyMemory,
    streams: tuple[Any, ...],
) -> list[Tensors]:
    """Fill free memory with NaN, then run the case on all streams at the same time."""
    for stream in streams:
        with stream:
            memory.fill()
    results = []
    for stream in streams:
        with stream:
            results.append(case.run(inputs))
    return results


def find_differences(first: Tensors, results: list[Tensors]) -> Iterator[tuple[int, Difference]]:
    """Yield the stream's index and the difference for each tensor that differs from run 0."""
    for number, result in enumerate(results):
        for difference in compare_bits(first, result):
            yield number, difference


def start_other_work(device: torch.device) -> None:
    """Start a large matrix product on the GPU, which overlaps with the next run."""
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
    """Return two contexts, each with a new current stream; for the CPU, one without effect."""
    if device.type != "cuda":
        return (contextlib.nullcontext(),)
    cuda: Any = torch.cuda
    return tuple(cuda.stream(cuda.Stream(device)) for _ in range(2))


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def run_device(name: str, runs: int, emit: Emit, exact: ExactValues = ALONE) -> None:
    """Run every case on one device and report progress."""
    device = torch.device("cpu") if name == "cpu" else torch.device("cuda", int(name))
    choose_cases: ChooseCases = PRODUCT.load(PRODUCT.cases)()
    emit({"event": "imported"})
    selected: list[dict[str, Any]] = []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if device.type == "cuda" and HAS_DISPATCHER:
        selected = select(device.index)
        emit({"event": "selected", "kernels": selected})
    run_cases(choose_cases(device, selected), device, runs, emit, exact)


def run_cases(
    cases: Sequence[Case], device: torch.device, runs: int, emit: Emit, exact: ExactValues = ALONE
) -> None:
    """Run cases on one device and report progress.

    Raises:
        ExtensionError: There are no cases.
    """
    if not cases:
        message = "the dispatcher has no complete set of kernels for this device"
        raise ExtensionError(message)
    emit({"event": "start", "cases": len(cases), "runs": runs, "torch": torch.__version__})
    for case in cases:
        emit({"event": "case", "case": case.name})
        started = time.monotonic()
        run_case(case, device, runs, emit, exact)
        emit({"event": "case-done", "case": case.name, "seconds": time.monotonic() - started})
        if device.type == "cuda" and HAS_DISPATCHER:
            emit({"event": "loaded", "variants": last_variant()})
    emit({"event": "done"})


def main() -> None:
    """Run the selftest in this process."""
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
        reason = error.message if isinstance(error, KernelsError) else text
        emit({"event": "error", "reason": reason})


if __name__ == "__main__":
    main()
