"""List the kernels that a run launches."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


def launched_kernels(run: Callable[[], object]) -> tuple[str, ...]:
    """Return the names of the kernels, without their template arguments."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    names = {shorten(event.key) for event in profile.key_averages()}
    return tuple(sorted(name for name in names if name and not _is_runtime(name)))


def shorten(name: str) -> str:
    """Drop `void`, template and call arguments, and namespaces."""
    bare = re.split(r"[<(]", name.removeprefix("void ").replace("(anonymous namespace)::", ""))[0]
    return bare.split("::")[-1].strip()


def _is_runtime(name: str) -> bool:
    """Return whether it is a call of the CPU (`cudaLaunchKernel`), or only memory."""
    return re.match(r"cu(da)?[A-Z]|Mem(set|cpy)\b|Activity Buffer|Lazy|INVALID", name) is not None
