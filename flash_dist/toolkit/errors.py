"""Errors that this package raises on purpose: one sentence each, and at most one sure next step."""

from __future__ import annotations

import errno
import os
from contextlib import contextmanager
from numbers import Number
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING

from .product import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator


class KernelsError(Exception):
    """A failure that a user can act on.

    Args:
        message: One sentence with the value received and the values allowed.
        hint: One sure step, shown after a blank line.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n\nhint: {self.hint}"


class UsageError(KernelsError):
    """An argument of the command line, or a stream, that a subcommand cannot use."""


class ArchError(KernelsError, ValueError):
    """An architecture, arch set, device or driver that is malformed or cannot be compiled."""


class FatbinError(KernelsError, ValueError):
    """A binary or wheel that cannot be read, or that contradicts itself."""


class AccessError(FatbinError):
    """A file that this user may not read, or that this Python cannot unpack. It may be sound."""


class LimitError(FatbinError):
    """A file that exceeds a limit on the work of reading it. Reading stops at the limit."""


class ExtensionError(KernelsError):
    """The compiled part of the package is absent or does not load."""


class GroupError(KernelsError):
    """A process group that is absent, or that does not match the tensors or the other ranks."""


class FetchError(KernelsError):
    """A page or file that could not be fetched."""


class ManifestError(KernelsError, ValueError):
    """A build manifest that is absent or does not describe this package."""


class AuditError(KernelsError):
    """A wheel that differs from what it declares."""


def show(value: object, most: int = 60) -> str:
    """Return the repr of a value on one line, shortened.

    NOTE: repr raises ValueError for an int of more than 4300 digits; messages must not fail then.
    """
    if type(value) is int and abs(value) < 2**63:  # torch.compile cannot trace repr
        return f"{index(value)}"
    try:
        text = " ".join(repr(value).split())
    except ValueError:
        holder = "" if isinstance(value, Number) else f"a {type(value).__name__} with "
        return f"{holder}a number of thousands of digits"
    return text if len(text) <= most else f"{text[:most]}..."


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def explain_os_error(error: OSError) -> KernelsError:
    """Return an error that says what the system refused, and for which file.

    NOTE: a `shutil.Error` from copying a folder has no errno, and its text has a line for each
    file.
    """
    listed = error.args[0] if error.args and isinstance(error.args[0], list) else []
    if listed:
        source, target, reason = listed[0]
        reason = str(reason).partition(f": {str(source)!r}")[0].rpartition("] ")[2]
        message = f"cannot copy {len(listed)} files, the first of them to `{target}`: {reason:.200}"
        no_room = any(os.strerror(number) in reason for number in _NO_ROOM)
    else:
        name = f"`{error.filename}`" if error.filename else "a file or stream"
        message = f"cannot use {name}: {error.strerror or f'{error:.200}'}"
        no_room = error.errno in _NO_ROOM
    hint = (
        f"free some space, or set folders on another disk: {VARIABLES}BUILD_DIR for builds, "
        "TMPDIR for everything else"
    )
    return KernelsError(message, hint=hint if no_room else None)


IN_CHECKOUT = Path(__file__).parents[2].joinpath("noxfile.py").is_file()


def hint_to_build(hint: str, otherwise: str) -> str:
    """Return `hint`, which names nox, if the sources are here; else `otherwise`.

    A wheel or a zipapp has neither a noxfile nor `dist/`.
    """
    return hint if IN_CHECKOUT else otherwise


@contextmanager
def wrong_usage() -> Iterator[None]:
    """Turn an ArchError about the value of an option into a UsageError with the same words.

    NOTE: ArchError is a ValueError, whose message argparse would discard.
    """
    try:
        yield
    except ArchError as error:
        raise UsageError(error.message, hint=error.hint) from error
