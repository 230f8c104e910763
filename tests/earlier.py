"""Programs that use operators by earlier names, saved by the wheel that had these names.

`python -m tests.earlier FILE.zip`, with that wheel installed, saves one program per operator, with
its inputs and results. Programs refer to a mask by its handle. FIRST is the handle of the first
mask of a process, so a process must make that mask before it runs a program.
"""

from __future__ import annotations

import io
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Tensor = torch.Tensor
SAVED: Final = Path(__file__).with_name("wheel") / "earlier.zip"
FIRST: Final = 2  # the first handle of a mask
SCALE, BUDGET = 0.25, 1 << 20
NOT_PACKED: Final = None, None, 0, 0
SCORES: Final = False, 2.0, None


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_mask() -> Any:  # noqa: ANN401
    """Return a mask of 5 queries and 7 keys; its handle is FIRST."""
    import flash_dist  # noqa: PLC0415

    mask = flash_dist.BlockMask.block_causal([0, 0, 1, 1, 2], [0, 1, 1, 2, 2, 2, 3])
    assert mask.handle == FIRST
    return mask


class Program(torch.nn.Module):
    """A call of one operator, with its tensors as inputs."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self.name = name
        self.arguments = arguments

    def forward(self, *tensors: Tensor) -> Any:  # noqa: ANN401
        given = iter(tensors)
        call = [next(given) if isinstance(x, Tensor) else x for x in self.arguments]
        return getattr(torch.ops.flash_dist, self.name)(*call)


def list_calls() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield each operator's name, and its arguments."""
    q, k, v, sinks = draw(1, 5, 2, 8), draw(1, 7, 1, 8), draw(1, 7, 1, 8), draw(2)
    band, ends = [0, -1, 0, 1], torch.tensor([0, 3, 5], dtype=torch.int32)
    lows = torch.zeros(1, 1, 5, dtype=torch.int64)
    plan = torch.ops.flash_dist.plan_intervals(lows, lows + 3, 7, False)  # noqa: FBT003
    intervals = plan, 1, 1, False
    dense = None, band, *NOT_PACKED, SCALE
    saved = draw(1, 5, 2, 8), q, k, v, draw(1, 5, 2, 8), draw(1, 2, 5), None
    backward = None, None, band, *NOT_PACKED, SCALE, BUDGET, False
    scores = *SCORES, sinks
    yield "fwd", (q, k, v, *dense)
    packed = draw(5, 2, 8), draw(5, 1, 8), draw(5, 1, 8)
    yield "fwd", (*packed, None, band, ends, ends, 3, 3, SCALE, True)
    yield "scored_fwd", (q, k, v, *dense, *scores)
    yield "bwd", (*saved, *backward)
    yield "scored_bwd", (*saved, *backward, *scores)
    yield "masked_fwd", (q, k, v, FIRST, SCALE, False)
    yield "masked_scored_fwd", (q, k, v, FIRST, SCALE, False, *scores)
    yield "masked_bwd", (*saved, FIRST, SCALE, BUDGET, False)
    yield "masked_scored_bwd", (*saved, FIRST, SCALE, BUDGET, False, *scores)
    yield "interval_fwd", (q, k, v, *intervals, SCALE, False, False)
    yield "interval_scored_fwd", (q, k, v, *intervals, SCALE, False, *scores)
    yield "interval_bwd", (*saved, *intervals, SCALE, False, False)
    yield "interval_scored_bwd", (*saved, *intervals, SCALE, False, *scores)
    lengths = torch.tensor([9, 11], dtype=torch.int32)
    cache = draw(2, 16, 1, 8), draw(2, 16, 1, 8), lengths
    numbers = 0, SCALE, -1, 0, BUDGET
    yield "decode", (draw(2, 1, 2, 8), *cache, *(None,) * 4, 0, *numbers)
    latent = draw(2, 1, 2, 16), draw(2, 16, 1, 16), 8, lengths
    yield "decode_mla", (*latent, None, SCALE, True, BUDGET)


def save(path: Path) -> None:
    """Save the programs of all operators, with inputs and results."""
    mask = make_mask()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for i, (name, arguments) in enumerate(list_calls()):
            tensors = tuple(x for x in arguments if isinstance(x, Tensor))
            program = torch.export.export(Program(name, arguments), tensors)
            file, results = io.BytesIO(), io.BytesIO()
            torch.export.save(program, file)
            torch.save((tensors, tuple(program.module()(*tensors))), results)
            archive.writestr(f"{i:02} {name}.pt2", file.getvalue())
            archive.writestr(f"{i:02} {name}.pt", results.getvalue())
    del mask


def run() -> None:
    """Run the saved programs, and print the operator of each."""
    mask = make_mask()
    with zipfile.ZipFile(SAVED) as archive:
        for entry in archive.namelist():
            if not entry.endswith(".pt2"):
                continue
            program = torch.export.load(io.BytesIO(archive.read(entry)))
            tensors, want = torch.load(io.BytesIO(archive.read(entry.removesuffix("2"))))
            torch.testing.assert_close(tuple(program.module()(*tensors)), want)
            print(Path(entry).stem.partition(" ")[2])  # noqa: T201
    del mask


if __name__ == "__main__":
    import flash_dist.kernels.cache  # noqa: F401 - registers the operators

    save(Path(sys.argv[1])) if len(sys.argv) > 1 else run()
