"""NVIDIA's tools, with which our readers are compared: nvcc, cuobjdump and nvdisasm.

    python -m tests.readers.tools

prints their paths; exit status 1 if one is missing, so that a session does not skip everything.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from ci.places import INCLUDES

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS: Final = ("nvcc", "cuobjdump", "nvdisasm")


def find_tool(name: str) -> str | None:
    """Search CUDA_HOME for nvcc, the packages of this Python for the rest, then PATH."""
    home = os.environ.get("CUDA_HOME") if name == "nvcc" else None
    folder = Path(home or Path(sysconfig.get_path("purelib")) / "nvidia" / "cu13") / "bin"
    return str(folder / name) if (folder / name).is_file() else shutil.which(name)


def needs(*tools: str) -> pytest.MarkDecorator:
    """Return a marker that skips a test if one of these tools is missing."""
    missing = [tool for tool in tools if find_tool(tool) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {' and '.join(missing)}")


def include(generated: Path) -> list[str]:
    """Return a compiler's flags for the include folders."""
    return [f"-I{folder}" for folder in (*INCLUDES, generated)]


def run(tool: str, *args: str | Path, folder: Path | None = None) -> str:
    """Run a tool and return its output; if the tool fails, raise with its error output."""
    command = [find_tool(tool) or tool, *map(str, args)]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, cwd=folder
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout


def compile_code(output: Path, source: str | Path, *options: str) -> Path:
    """Compile a CUDA source, given as text or file. Options and suffix choose the output's kind."""
    if isinstance(source, str):
        code = output.with_suffix(".cu")
        code.write_text(source, encoding="utf-8")
        source = code
    run("nvcc", "--threads=0", *options, "-o", output, source)  # all targets at once
    return output


def gencode(*targets: str) -> list[str]:
    """Return nvcc's options for targets such as `sm_75` and `compute_90`."""
    return [f"-gencode=arch=compute_{one.rpartition('_')[2]},code={one}" for one in targets]


class Resources(NamedTuple):
    """One kernel, as both tools describe it."""

    target: str
    name: str
    registers: int | None
    stack: int | None
    static_smem: int | None


_LISTED = re.compile(r"\.(sm_[0-9]+[af]?)\.(cubin|ptx)$", re.MULTILINE)
_USED = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)")


def list_images(path: Path) -> Counter[tuple[str, str]]:
    """Ask cuobjdump for kind and target of all images. cuobjdump names PTX for 8.0 `sm_80`, too."""
    text = run("cuobjdump", "-all", "-lelf", "-lptx", path)
    return Counter((match[2], match[1]) for match in _LISTED.finditer(text))


def extract_images(path: Path, folder: Path) -> list[bytes]:
    """Let cuobjdump write all images into a folder and read them."""
    for option in ("-xelf", "-xptx"):
        run("cuobjdump", "-all", option, "all", path.resolve(), folder=folder)
    images = (*folder.glob("*.cubin"), *folder.glob("*.ptx"))
    return [image.read_bytes() for image in images]


def list_resources(path: Path) -> Counter[Resources]:
    """Ask cuobjdump for the resources of all kernels and device functions."""
    found: Counter[Resources] = Counter()
    target = name = ""
    for line in run("cuobjdump", "-all", "-res-usage", path).splitlines():
        if line.startswith("arch = "):
            target = line.removeprefix("arch = ")
        elif line.startswith(" Function "):
            name = line.removeprefix(" Function ").removesuffix(":")
        elif (used := _USED.search(line)) is not None and name:
            found[Resources(target, name, *map(int, used.groups()))] += 1
            name = ""
    return found


def main(tools: Sequence[str] = TOOLS) -> int:
    """Print the paths of the tools."""
    for tool in tools:
        print(f"{tool}: {find_tool(tool) or 'missing'}")  # noqa: T201 - a program
    return int(any(find_tool(tool) is None for tool in tools))


if __name__ == "__main__":
    sys.exit(main())
