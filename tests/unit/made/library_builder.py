"""Makes small shared libraries with the C compiler, without the system's libraries."""

from __future__ import annotations

import shutil
import struct
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def define(*names: str) -> str:
    """Return C source that defines functions."""
    return "".join(f"void {name}(void) {{}}\n" for name in names)


def call(*names: str) -> str:
    """Return C that calls functions of other libraries."""
    declared = "".join(f"void {name}(void);\n" for name in names)
    return declared + "void calls(void) {" + "".join(f"{name}();" for name in names) + "}\n"


def make_cache(*entries: tuple[str, str] | tuple[str, str, int], damaged: int = 0) -> bytes:
    """Return a cache in `ldconfig`'s form: name, file and, for newer CPUs, their requirements.

    Args:
        entries: Entries of the cache.
        damaged: Offset of the name of one more entry; 0 for none.
    """
    count = len(entries) + bool(damaged)
    start, strings, table = 48 + 24 * count, b"", b""
    for name, file, *capability in entries:
        key = start + len(strings)
        value = key + len(name) + 1
        strings += f"{name}\0{file}\0".encode()
        table += struct.pack("<iIIIQ", 0x303, key, value, 0, *(capability or [0]))
    if damaged:
        table += struct.pack("<iIIIQ", 0x303, damaged, start, 0, 0)
    header = struct.pack("<20sII20x", b"glibc-ld.so.cache1.1", count, len(strings))
    return header + table + strings


@dataclass(frozen=True)
class Lab:
    """A folder in which tests build libraries."""

    folder: Path

    def build(
        self,
        name: str,
        source: str,
        *options: str,
        needs: tuple[Path, ...] = (),
        version: str = "",
        soname: str = "",
    ) -> Path:
        """Compile a library into a path below the folder.

        Args:
            name: The path.
            source: Source in C.
            options: Options of the linker.
            needs: Libraries that the new library needs.
            version: Symbol version of all its definitions.
            soname: Its SONAME; the file name when empty.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        given = (source, options, version, soname or path.name)
        path.write_bytes(_compile(*given) if not needs else _link(*given, needs))
        return path


@cache
def _compile(source: str, options: tuple[str, ...], version: str, soname: str) -> bytes:
    """Compile a library without needs. Results are cached: many tests use equal libraries."""
    return _link(source, options, version, soname, ())


def _link(
    source: str, options: tuple[str, ...], version: str, soname: str, needs: tuple[Path, ...]
) -> bytes:
    with TemporaryDirectory() as folder:
        code, script, out = (Path(folder, name) for name in ("code.c", "versions", "out.so"))
        code.write_text(source or "extern int nothing;\n")
        script.write_text(f"{version} {{ global: *; }};\n")
        command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-w", str(code), "-o", str(out)]
        command += [f"-Wl,-soname,{soname}", "-Wl,--no-as-needed", *map(str, needs)]
        command += [f"-Wl,--version-script={script}"] if version else []
        subprocess.run([*command, *options], check=True)
        return out.read_bytes()
