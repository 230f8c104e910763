"""Reads the CUDA toolkit of a cubin, which ptxas writes into notes and kernel attributes.

From CUDA 12.8 on `.note.nv.tkinfo` names the release as text (older ABI: no notes), and
`.note.nv.cuinfo` has it as a number, 130 for 13.0; the attributes of kernels have the same number
in all cubins seen, back to CUDA 11. This was found by building with several toolkits; it is not a
stable ABI.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol

from ..errors import FatbinError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ..binaries.elf import Section

TOOLS_NOTE, NUMBER_NOTE = ".note.nv.tkinfo", ".note.nv.cuinfo"
EIATTR_CUDA_API_VERSION: Final = 0x37  # u32, 130 for CUDA 13.0

_RELEASE: Final = re.compile(
    rb"release [0-9]{1,3}\.[0-9]{1,3}, V([0-9]{1,3}(?:\.[0-9]{1,5}){1,2})\0"
)
_CUINFO: Final = Struct("<III12sHHHH")  # sizes, type, "NVIDIA Corp", version, arch, CUDA, zero
_OWNER: Final = b"NVIDIA Corp\0"
_NUMBER: Final = Struct("<I")
_KNOWN: Final = range(60, 1000)  # 6.0 to 99.9
_KERNELS: Final = 8  # kernels to ask before the toolkit counts as unknown
MAX_NOTE: Final = 64 << 10


class Sections(Protocol):
    """The required part of a cubin."""

    @property
    def sections(self) -> Mapping[str, Section]:
        """Its sections by name."""

    def contents(self, section: str) -> bytes:
        """Return the bytes of a section."""

    def attributes(self, section: str) -> Iterator[tuple[int, bytes]]:
        """Yield the attributes of a kernel's section."""


def read_toolkit(cubin: Sections) -> str:
    """Return the version, `13.0.88` or `12.6`; empty if the cubin does not tell."""
    match = _RELEASE.search(_contents(cubin, TOOLS_NOTE))
    if match is not None:
        return match[1].decode()
    note = _contents(cubin, NUMBER_NOTE)
    if len(note) >= _CUINFO.size:
        fields = _CUINFO.unpack_from(note)
        if fields[3] == _OWNER and fields[6] in _KNOWN:
            return _format(fields[6])
    return _read_attribute(cubin)


def _read_attribute(cubin: Sections) -> str:
    names = (name for name in cubin.sections if name.startswith(".nv.info."))
    for name in islice(names, _KERNELS):
        number = _read_number(cubin, name)
        if number in _KNOWN:
            return _format(number)
    return ""


def _read_number(cubin: Sections, name: str) -> int:
    """Return the attribute of one kernel; 0 if it is absent or damaged."""
    with suppress(FatbinError):  # reported where the kernel is read
        for attribute, value in cubin.attributes(name):
            if attribute == EIATTR_CUDA_API_VERSION and len(value) == _NUMBER.size:
                return int(_NUMBER.unpack(value)[0])
    return 0


def _contents(cubin: Sections, name: str) -> bytes:
    section = cubin.sections.get(name)
    if section is None or section.size > MAX_NOTE:
        return b""
    try:
        return cubin.contents(name)
    except FatbinError:
        return b""


def _format(number: int) -> str:
    return f"{number // 10}.{number % 10}"
