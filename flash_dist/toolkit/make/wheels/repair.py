"""Gives a wheel the manylinux tag that auditwheel determines, even a wheel for another CPU.

python -m PACKAGE.toolkit.make.wheels.repair [--plat manylinux_2_28] WHEEL FOLDER
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..project import MAKE
from ..toolchain.cross import target_machine

if TYPE_CHECKING:
    from collections.abc import Sequence

# Libraries of torch, of the driver and of NVIDIA's runtime package. auditwheel neither copies them
# into the wheel nor considers them for the tag.
EXCLUDED: Final = ("libtorch*.so*", "libc10*.so*", "libcuda.so.*", "libcudart.so.*")


def repair_words(wheel: Path, folder: Path, machine: str, plat: str | None = None) -> list[str]:
    """Return the command line of auditwheel.

    Args:
        wheel: The wheel to repair.
        folder: Folder of the repaired wheel.
        machine: The target CPU of the wheel.
        plat: The tag without the CPU; None: the oldest tag that the libraries support.
    """
    tag = f"{plat}_{machine}" if plat else "auto"
    excludes = [word for library in EXCLUDED for word in ("--exclude", library)]
    words = ["auditwheel", "repair", "--plat", tag, "--only-plat", *excludes]
    return [*words, "--zip-compression-level", "9", "-w", str(folder), str(wheel)]


def main(args: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog=f"python -m {MAKE}.wheels.repair")
    parser.add_argument("--plat", help="the tag it must get, without the CPU")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(args)
    machine = target_machine()
    sys.argv = repair_words(given.wheel, given.folder, machine, given.plat)
    # NOTE: auditwheel repairs wheels for any CPU, but accepts only tags of the CPU it runs on.
    # manylinux images set AUDITWHEEL_PLAT to a tag of their own CPU.
    platform.machine = lambda: machine
    os.environ.pop("AUDITWHEEL_PLAT", None)
    logging.basicConfig(level=logging.WARNING)  # replaces auditwheel's logging of every step
    print(f"repairing {given.wheel.name}", flush=True)
    from auditwheel.main import main as auditwheel  # noqa: PLC0415 - reads the CPU on import

    return auditwheel() or 0


if __name__ == "__main__":
    sys.exit(main())
