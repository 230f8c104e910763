"""`csrc/generate.py`, a script beside C++ and no module of a package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Final

CSRC: Final = Path(__file__).resolve().parents[3] / "csrc"


def _load() -> Any:  # noqa: ANN401 - a script
    spec = importlib.util.spec_from_file_location("generate", CSRC / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate"] = module
    spec.loader.exec_module(module)
    return module


generate: Final = _load()
