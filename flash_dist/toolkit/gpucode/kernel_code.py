"""Hashes a kernel's code: the same code in another wheel has the same hash."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from ..errors import FatbinError
from .cubin import Cubin
from .fatbin import Fatbin, open_fatbin
from .sass import ptx_texts

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator


_PTX_HEAD: Final = re.compile(r"^\s*\.(?:version|target|address_size)\b.*$", re.MULTILINE)


def read_code_hashes(library: str | os.PathLike[str]) -> dict[str, str]:
    """Return the SHA-256 of each kernel's code in a library, by kernel name.

    The hash of SASS covers instructions and constants. The hash of PTX covers version, target and
    text without comments. If a kernel has code for several targets, the key also names the target:
    `f sm_80`.

    Raises:
        FatbinError: The library cannot be read, or has different code for the same kernel and
            target.
    """
    with open_fatbin(library) as fatbin:
        return hash_kernels(fatbin)


def hash_kernels(fatbin: Fatbin) -> dict[str, str]:
    """Return the same hashes as `read_code_hashes`, for an open library."""
    found: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for target, name, code in _walk(fatbin):
        hashed = hashlib.sha256(code).hexdigest()
        if found[name].setdefault(target, hashed) != hashed:
            message = f"`{fatbin.report.path}` holds kernel `{name}` twice, with different code"
            raise FatbinError(message)
    return {
        f"{name} {target}" if len(codes) > 1 else name: code
        for name, codes in found.items()
        for target, code in codes.items()
    }


def _walk(fatbin: Fatbin) -> Iterator[tuple[str, str, bytes]]:
    for entry in fatbin.report.select():
        data = fatbin.payload(entry)
        kernels = _walk_ptx(data) if entry.kind == "ptx" else _walk_cubin(Cubin(data))
        yield from ((str(entry.arch), name, code) for name, code in kernels)


def _walk_cubin(cubin: Cubin) -> Iterator[tuple[str, bytes]]:
    for symbol in cubin.kernels():
        text = cubin.contents(f".text.{symbol.name}")[symbol.value :][: symbol.size]
        constants = sorted(
            name
            for name in cubin.sections
            if name.startswith(".nv.constant") and name.endswith(f".{symbol.name}")
        )
        yield symbol.name, b"".join((text, *map(cubin.contents, constants)))


def _walk_ptx(text: bytes) -> Iterator[tuple[str, bytes]]:
    source = text.decode("utf-8", "backslashreplace")
    head = "\n".join(line.strip() for line in _PTX_HEAD.findall(source))
    for name, body in ptx_texts(text):
        yield name, f"{head}\n{body}".encode()
