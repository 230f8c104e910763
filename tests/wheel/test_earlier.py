"""Programs that an earlier version saved run with this one."""

from __future__ import annotations

import subprocess
import sys

from flash_dist.kernels import earlier, operators  # noqa: F401 - the second registers them
from tests import earlier as programs


def test_every_operator_by_an_earlier_name_serves_a_program_saved_then() -> None:
    command = [sys.executable, programs.__file__]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = {schema.partition("(")[0] for schema in earlier.OPERATORS}
    assert set(done.stdout.split()) == names | {"decode"}
