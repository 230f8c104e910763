"""Demangles C++ names with libstdc++.

A name of 230 characters can demangle to 140 million, so the demangler runs in a child process,
which is stopped if a name takes too much time or memory. The child runs this module as a script.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import re
import select
import subprocess
import sys
import time
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LIBRARY: Final = "libstdc++.so.6"
MAX_NAME: Final = 64 * 1024
MAX_DEMANGLED: Final = 1 << 20
MAX_MEMORY: Final = 1 << 30  # address space of the child
MAX_SECONDS: Final = 1.0  # maximum CPU seconds per name in the child; a long name takes 0.001
PATIENCE: Final = 10.0  # maximum seconds until the child answers, even on a busy machine
MAX_FAILURES: Final = 3  # crashes and timeouts of the child, after which names stay mangled

_MANGLED = re.compile(r"_Z[\w$.]+", re.ASCII)
_ANONYMOUS = "(anonymous namespace)"
_NESTED = "_ZN"
_LENGTH = re.compile(r"[1-9][0-9]{0,4}")
_OPENERS = {")": "(", "]": "[", "}": "{", ">": "<"}


@lru_cache(maxsize=65_536)
def demangle(name: str) -> str:
    """Return a C++ name in readable form, or the name itself if that is not possible.

    NOTE: libstdc++ refuses names of more than 1024 characters; such names stay mangled.
    """
    if len(name) > MAX_NAME or _MANGLED.fullmatch(name) is None:
        return name
    return _child.ask(name) or name


def short_name(demangled: str) -> str:
    """Return a demangled name without its return type and arguments.

    If a nested name is still mangled, return its identifiers: `cutlass::device_kernel<...>`.
    """
    if demangled.startswith(_NESTED):
        return _read_nested(demangled)
    start = 0
    for place, character, depth in _walk(demangled):
        if depth:
            continue
        if character == " ":
            start = place + 1
        elif character == "(" and not demangled.startswith(_ANONYMOUS, place):
            return demangled[start:place] or demangled
    return demangled


def _read_nested(mangled: str) -> str:
    """Return `cutlass::device_kernel<...>` for `_ZN7cutlass13device_kernelI...`.

    Source: Itanium C++ ABI, 5.1.2 and 5.1.4: a nested name is a list of lengths and identifiers.
    """
    parts, place = [], len(_NESTED)
    while (match := _LENGTH.match(mangled, place)) is not None:
        end = match.end() + int(match[0])
        if not match.end() < end <= len(mangled):
            return mangled
        part = mangled[match.end() : end]
        parts.append(_ANONYMOUS if part.startswith("_GLOBAL__N_") else part)
        place = end
    if not parts or mangled[place : place + 1] not in {"I", "E"}:
        return mangled
    return "::".join(parts) + ("<...>" if mangled[place] == "I" else "")


def _walk(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield each character's index, the character, and the number of brackets open before it."""
    opened: list[str] = []
    count = dict.fromkeys("([{<", 0)
    for place, character in enumerate(text):
        yield place, character, len(opened)
        opener = _OPENERS.get(character)
        if character in count:
            opened.append(character)
            count[character] += 1
        elif opener == "<":
            if opened and opened[-1] == "<" and text[place - 1] != "-":  # not in `->`
                opened.pop()
                count["<"] -= 1
        elif opener is not None and count[opener]:
            while True:  # drop `<` of operators, which nothing closes
                last = opened.pop()
                count[last] -= 1
                if last == opener:
                    break


class _Child:
    """The demangling process: starts with the first name, stays off after MAX_FAILURES failures."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0

    def ask(self, name: str) -> str:
        """Return the demangled name; empty if the name cannot be demangled."""
        if not sys.platform.startswith("linux") or self._failures >= MAX_FAILURES:
            return ""
        try:
            process = self._process or self._start()
            return _exchange(process, name)
        except (OSError, TimeoutError):
            self._failures += 1
            self.stop()
            return ""

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        return self._process

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            with process:
                process.kill()


def _exchange(process: subprocess.Popen[bytes], name: str) -> str:
    """Send a name to the child as one line, and return the line that it sends back."""
    if process.stdin is None or process.stdout is None:
        return ""
    process.stdin.write(name.encode() + b"\n")
    deadline = time.monotonic() + PATIENCE
    answer = bytearray()
    while not answer.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(0, deadline - time.monotonic()))
        chunk = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
        if not chunk:
            message = f"no answer within {PATIENCE} s"
            raise TimeoutError(message)
        answer += chunk
    return answer[:-1].decode("utf-8", "backslashreplace")


_child = _Child()
atexit.register(_child.stop)


def serve() -> None:
    """Answer each line of stdin with its demangled name, or with an empty line."""
    import resource  # noqa: PLC0415  (absent on Windows)
    from signal import ITIMER_PROF, setitimer  # noqa: PLC0415

    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    call = load()
    for line in sys.stdin.buffer:
        setitimer(ITIMER_PROF, MAX_SECONDS)  # the signal of this timer ends the process
        demangled = call(line.rstrip(b"\n"))
        setitimer(ITIMER_PROF, 0)
        answer = demangled if len(demangled) <= MAX_DEMANGLED and b"\n" not in demangled else b""
        sys.stdout.buffer.write(answer + b"\n")
        sys.stdout.buffer.flush()


def load() -> Callable[[bytes], bytes]:
    """Return the demangler of libstdc++. It returns b"" on failure, or if libstdc++ is absent."""
    try:
        function = ctypes.CDLL(LIBRARY)["__cxa_demangle"]
        free = ctypes.CDLL(None)["free"]
    except (OSError, AttributeError):
        return lambda _: b""
    function.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_void_p
    free.argtypes, free.restype = (ctypes.c_void_p,), None

    def call(name: bytes) -> bytes:
        address = function(name, None, None, None)
        if not address:
            return b""
        try:
            return ctypes.string_at(address)
        finally:
            free(address)

    return call


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        serve()
