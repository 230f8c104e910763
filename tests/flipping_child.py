"""Child process of a selftest in which rank 1 computes one wrong bit, which a fleet must find.

The bit is wrong in every process. If TEST_FLIPPED names a file, the bit is wrong only in the first
process, which creates the file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from flash_dist.toolkit.selftest import child, comparison

if TYPE_CHECKING:
    from flash_dist.toolkit.selftest.comparison import Tensors

WRONG_RANK = "1"
WRONG_CALL = 4  # index of the case to flip

calls = 0
hash_tensors = comparison.digest


def digest(tensors: Tensors) -> dict[str, str]:
    """Return the digests of tensors; for the wrong call, flip a bit of dk first."""
    global calls  # noqa: PLW0603 - a process of its own
    if os.environ["RANK"] == WRONG_RANK and calls == WRONG_CALL and is_wrong_time():
        wrong = tensors["dk"].clone()
        wrong.view(torch.uint8).view(-1)[7] ^= 1
        tensors = {**tensors, "dk": wrong}
    calls += 1
    return hash_tensors(tensors)


def is_wrong_time() -> bool:
    """Tell if this process has to compute a wrong bit."""
    mark = os.environ.get("TEST_FLIPPED")
    if mark is None:
        return True
    first = not Path(mark).exists()
    Path(mark).touch()
    return first


if __name__ == "__main__":
    setattr(child, "digest", digest)  # noqa: B010 - for mypy it is not exported
    child.main()
