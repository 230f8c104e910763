"""Child process of `doctor`: loads the compiled parts one by one and reports each.

python -m PACKAGE.toolkit.loading.child --report FILE
"""

from __future__ import annotations

import argparse
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ..builds.package import PACKAGE
from ..errors import KernelsError
from ..product import BINDING, HAS_DISPATCHER, PRODUCT
from .library import load_library
from .process import end_with, write_event

if TYPE_CHECKING:
    from collections.abc import Callable


def load_extension() -> None:
    """Load the library of torch operators."""
    if PRODUCT.operators:
        PRODUCT.load(PRODUCT.operators)
    else:
        import_module("torch").ops.load_library(str(PACKAGE / BINDING))


STAGES: tuple[tuple[str, Callable[[], object]], ...] = (
    *((("kernels", load_library),) if HAS_DISPATCHER else ()),
    ("torch", partial(import_module, "torch")),
    ("extension", load_extension),
)


def report_loading(report: Path) -> None:
    """Load the parts in order; write an event before each stage, and one for the result."""
    for stage, load in STAGES:
        write_event(report, {"event": "stage", "stage": stage})
        try:
            load()
        except Exception as error:  # noqa: BLE001 - any failure is the finding
            reason = error.message if isinstance(error, KernelsError) else str(error)
            reason = reason or type(error).__name__
            write_event(report, {"event": "failed", "stage": stage, "reason": reason})
            return
    write_event(report, {"event": "loaded"})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--parent", type=int)
    arguments = parser.parse_args()
    end_with(arguments.parent)
    report_loading(arguments.report)
