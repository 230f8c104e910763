"""Compiler launcher: runs a compiler and stores ptxas's output for later checks.

CMake runs every compiler through this program: `python gate.py [ccache] nvcc ... -o OBJECT`. The
output of ptxas is stored next to the object as OBJECT.ptxas.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

FRAME: Final = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)

# Messages of shell, g++ and nvcc after a compiler was killed or ran out of memory.
_NO_MEMORY: Final = re.compile(
    r"^(?:.*: *(?:\d+ +)?)?Killed(?: {2,}.*)?$"
    r"|Killed signal terminated program|died due to signal 9\b"
    r"|out of memory allocating|virtual memory exhausted|LLVM ERROR: out of memory",
    re.MULTILINE,
)

# Errors of nvcc and g++ if a namespace and something else have the same name.
_TWICE: Final = ("has already been declared in the current scope", "redeclared as different kind")
_NAMESPACE: Final = re.compile(r"#define KERNEL_NAMESPACE (\w+)")


def main(command: list[str]) -> int:
    """Run a compiler and return its status; of ptxas's output, print only warnings and errors."""
    done = subprocess.run(
        command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True, check=False
    )
    from_ptxas = ptxas_lines(done.stdout)
    _say(line for line in done.stdout.splitlines() if line not in set(from_ptxas))
    _say(line for line in from_ptxas if "warning" in line or "error" in line)
    target = Path(command[command.index("-o") + 1]) if "-o" in command else None
    if done.returncode:
        if target:  # remove the object of an earlier run, as it may look like the new one
            target.unlink(missing_ok=True)
        killed = done.returncode == -signal.SIGKILL or _NO_MEMORY.search(done.stdout)
        _say(["", "hint: memory ran out: `MAX_JOBS=1` needs the least"] if killed else [])
        _say(explain_clash(done.stdout))
    elif target:
        kept = target.with_name(f"{target.name}.ptxas")
        if from_ptxas:
            kept.write_text("".join(f"{line}\n" for line in from_ptxas), encoding="utf-8")
        else:
            kept.unlink(missing_ok=True)
    return max(done.returncode, 0) or int(done.returncode < 0)


def ptxas_lines(text: str) -> list[str]:
    """Return ptxas's lines, without the output of other programs."""
    return [x for x in text.splitlines() if x.startswith("ptxas") or FRAME.search(x)]


def explain_clash(text: str, product: Path = Path("generated/product.h")) -> list[str]:
    """Return a hint if a function or type has the name of the namespace.

    Args:
        text: Output of a failed compiler.
        product: The header with the namespace; compilers run in the build folder.
    """
    header = product.read_text(encoding="utf-8") if product.is_file() else ""
    for name in _NAMESPACE.findall(header):
        lines = [line for line in text.splitlines() if any(said in line for said in _TWICE)]
        if re.search(rf"\b{name}\b(?!::)", "\n".join(lines)):
            told = f"`{name}` is the C++ namespace of the toolkit's functions, too"
            other = f'`namespace = "{name}_kernels"` of [tool.kernels] renames it'
            return ["", f"hint: {told}: {other}"]
    return []


def _say(lines: Iterable[str]) -> None:
    sys.stderr.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
