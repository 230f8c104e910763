"""Checks that an image is what the header of its entry claims."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..binaries.elf import EM_CUDA, read_elf
from ..errors import FatbinError
from ..targets.devices import format_version
from .cubin_target import read_number, read_target

if TYPE_CHECKING:
    from ..binaries.budget import Budget
    from ..targets.archs import Arch
    from .images import FatbinEntry

_HEAD_BYTES: Final = 64 << 10  # of PTX, containing its directives
_VERSION: Final = re.compile(rb"^\s*\.version\s+([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", re.MULTILINE)
_TARGET: Final = re.compile(rb"^\s*\.target\s+sm_([0-9]{1,4})([af]?)\b", re.MULTILINE)


def check_image(entry: FatbinEntry, data: bytes, budget: Budget) -> Arch | None:
    """Compare the head of an unpacked image with the header of its entry.

    Returns:
        The target according to the image itself: a cubin's suffix may differ from its header's.

    Raises:
        FatbinError: It contradicts its header.
    """
    if entry.kind == "sass":
        return _check_cubin(entry, data, budget)
    if entry.kind == "ptx":
        return _check_ptx(entry, data[:_HEAD_BYTES])
    return entry.arch


def _check_cubin(entry: FatbinEntry, data: bytes, budget: Budget) -> Arch | None:
    elf = read_elf(data, budget)
    number = read_number(elf)  # 0: unknown ABI
    if elf.machine != EM_CUDA or number == 0:
        return entry.arch
    if number != entry.raw_number:
        message = f"its cubin is for target number {number}, its header declares {entry.raw_number}"
        raise FatbinError(message)
    return read_target(data, elf, entry.arch.suffix if entry.arch else "") or entry.arch


def _check_ptx(entry: FatbinEntry, head: bytes) -> Arch | None:
    version, target = _VERSION.search(head), _TARGET.search(head)
    if version is None or target is None:
        message = "its PTX lacks .version or .target"
        raise FatbinError(message)
    isa = int(version[1]), int(version[2])
    if entry.ptx_isa is not None and isa != entry.ptx_isa:
        said = format_version(entry.ptx_isa)
        message = f"its PTX has ISA {format_version(isa)}, its header declares {said}"
        raise FatbinError(message)
    if int(target[1]) != entry.raw_number:
        message = (
            f"its PTX is for target number {target[1].decode()}, "
            f"its header declares {entry.raw_number}"
        )
        raise FatbinError(message)
    suffix = target[2].decode()
    return entry.arch and replace(entry.arch, suffix=suffix)
