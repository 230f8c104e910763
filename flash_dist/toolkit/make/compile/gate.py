"""Compiler launcher: runs nvcc and keeps what ptxas says, for what judges the whole build.

CMake puts it before every nvcc call: `python gate.py [ccache] nvcc ... -o OBJECT`.
The text lies next to the object as OBJECT.ptxas.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

if __package__:
    from .ptxas import ptxas_lines
else:  # CMake names the file
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from ptxas import ptxas_lines  # type: ignore[import-not-found, no-redef]


def main(command: list[str]) -> int:
    """Run the command, and pass on what others than ptxas say and its warnings."""
    done = subprocess.run(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=False
    )
    from_ptxas = ptxas_lines(done.stdout)
    _say(line for line in done.stdout.splitlines() if line not in set(from_ptxas))
    _say(line for line in from_ptxas if "warning" in line or "error" in line)
    if done.returncode == 0 and "-o" in command:
        target = Path(command[command.index("-o") + 1])
        text = "".join(f"{line}\n" for line in from_ptxas)
        target.with_name(f"{target.name}.ptxas").write_text(text, encoding="utf-8")
    return done.returncode


def _say(lines: Iterable[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
