"""Text made fit for a terminal."""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
from typing import IO, TYPE_CHECKING

from ...product import NAME, PROGRAM

if TYPE_CHECKING:
    from ...errors import KernelsError

_FLEET = f"-m {NAME} fleet"
_CALL = re.compile(rf"{PROGRAM}\.|{PROGRAM}|{_FLEET}")


def printable(text: str) -> str:
    """Escape whatever could steer a terminal or begin a line; names may hold anything."""
    spelled = spell(text)
    if spelled.isprintable():  # as nearly all is: a table may have a hundred thousand names
        return spelled
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in spelled
    )


def printable_error(error: KernelsError) -> str:
    """Write an error in one line, and its hint in another after a blank one."""
    hint = f"\n\nhint: {printable(error.hint)}" if error.hint is not None else ""
    return f"{printable(error.message)}{hint}"


def spell(text: str) -> str:
    """Name this program as it was called: a file `NAME.pyz` is no module that is installed."""
    called = sys.argv[0] if sys.argv else ""
    if not called.endswith(".pyz"):
        return text
    called = shlex.quote(called)
    calls = {
        f"{PROGRAM}.": f"PYTHONPATH={called} {PROGRAM}.",  # a module inside
        PROGRAM: f"python {called}",
        _FLEET: f"{called} fleet",  # behind torchrun
    }
    return _CALL.sub(lambda match: calls[match.group()], text)


def escape_unknown(stream: IO[str]) -> None:
    """Let what the encoding of a stream lacks be escaped, as on stderr; names may hold anything."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def complain(text: str) -> None:
    """Print on stderr. Where that is closed or full, nobody is left to tell."""
    if sys.stderr is None:  # print would take stdout
        return
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream: IO[str]) -> None:
    """Let what is still buffered go nowhere: Python flushes once more on exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
