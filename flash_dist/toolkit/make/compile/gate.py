"""Compiler launcher: runs nvcc, keeps what ptxas says, fails when a kernel spills or worse.

CMake puts it before every nvcc call:
`python gate.py [--report-only] [--exceptions FILE] [ccache] nvcc ... -o OBJECT`.
The text lies next to the object as OBJECT.ptxas.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

if __package__:
    from .ptxas import load_exceptions, ptxas_lines, refusals
else:  # CMake names the file
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from ptxas import (  # type: ignore[import-not-found, no-redef]
        load_exceptions,
        ptxas_lines,
        refusals,
    )


def main(argv: list[str]) -> int:
    """Run the command and judge its ptxas output."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--report-only", action="store_true")
    parser.add_argument("--exceptions", type=Path)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args(argv)
    command, report_only = args.command, args.report_only
    done = subprocess.run(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=False
    )
    from_ptxas = ptxas_lines(done.stdout)
    _say(line for line in done.stdout.splitlines() if line not in set(from_ptxas))
    _say(line for line in from_ptxas if "warning" in line or "error" in line)
    if done.returncode or "-o" not in command:
        return done.returncode
    target = Path(command[command.index("-o") + 1])
    refused = refusals(done.stdout, load_exceptions(args.exceptions))
    _say(f"{'warning' if report_only else 'error'}: {sentence}" for sentence in refused)
    if refused and not report_only:
        target.unlink(missing_ok=True)
        named = "`spills` of [tool.kernels.gates], whose `symbol` is a pattern such as `*name*`"
        _say(["", f"hint: reduce the tile, or allow it in {named}"])
        return 1
    text = "".join(f"{line}\n" for line in from_ptxas)
    target.with_name(f"{target.name}.ptxas").write_text(text, encoding="utf-8")
    return 0


def _say(lines: Iterable[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
