"""Runs tests with a default device of torch other than the CPU.

Tensors that a test makes itself stay on the CPU: only the package's tensors that are made without
`device=` land on the default device.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

TESTS: Final = f"{Path(__file__).parent}{os.sep}"
TORCH: Final = f"{Path(torch.__file__).parent}{os.sep}"


class _TestsOnCpu(TorchFunctionMode):
    """Passes the CPU as the device of calls by tests, unless they name a device."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch's function returns
        """Call a function of torch, with the CPU as its device if a test makes a tensor."""
        del types
        given = dict(kwargs or {})
        says_nothing = func in _device_constructors() and given.get("device") is None
        if says_nothing and _is_called_by_a_test():
            given["device"] = "cpu"
        return func(*args, **given)


def _is_called_by_a_test() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back  # skip torch's frames, up to the caller of torch
    return frame is not None and frame.f_code.co_filename.startswith(TESTS)


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """Set the default device in a scope: `meta` by a context, others by `set_default_device`."""
    if name == "meta":
        with torch.device("meta"), _TestsOnCpu():
            yield
        return
    before = torch.get_default_device()
    torch.set_default_device(name)
    try:
        with _TestsOnCpu():
            yield
    finally:
        torch.set_default_device(before)
