"""Programs saved by an earlier version run with this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from flash_dist.kernels import earlier, operators  # noqa: F401 - the second registers them

PROGRAMS: Final = Path(__file__).resolve().parents[1] / "earlier.py"


def test_every_operator_by_an_earlier_name_serves_a_program_saved_then() -> None:
    done = subprocess.run(
        [sys.executable, str(PROGRAMS)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    names = {schema.partition("(")[0] for schema in earlier.OPERATORS}
    assert set(done.stdout.split()) == names | {"decode"}
