"""Reads METADATA and WHEEL of a wheel with the library `packaging`."""

from __future__ import annotations

from dataclasses import dataclass
from email.errors import MessageError
from email.parser import BytesHeaderParser
from typing import TYPE_CHECKING, Final

from ..binaries.files import unreadable
from ..errors import AuditError

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    from ..binaries.wheel import Wheel


NAME: Final = "METADATA"
ANY_PYTHON: Final = ("py3", "none")  # tags of every wheel: no library uses symbols of Python
PYTHON: Final = ">=3.10"  # Requires-Python of every wheel
# Raised by email and by packaging, which before version 26 fails on a Content-Type without text.
_REFUSALS: Final = (AssertionError, AttributeError, MessageError, ValueError)


@dataclass(frozen=True)
class Metadata:
    """The fields of METADATA that we use; empty or None if absent."""

    text: bytes  # the whole file
    version: str
    python: SpecifierSet | None  # supported versions: `>=3.10`
    requirements: tuple[Requirement, ...] = ()
    summary: str = ""
    license: str = ""
    homepage: str = ""


def read_metadata(wheel: Wheel) -> Metadata:
    """Read the METADATA of a wheel.

    Raises:
        KernelsError: METADATA is absent or malformed.
    """
    found = [name for name in wheel.names if name.endswith(f".dist-info/{NAME}")]
    if len(found) != 1:
        message = f"`{wheel.path}` holds {len(found)} {NAME} files, not one"
        raise AuditError(message)
    return parse_metadata(wheel.read(found[0]), wheel.path)


def parse_metadata(text: bytes, archive: str) -> Metadata:
    """Parse METADATA, whose description may be cut off.

    Args:
        text: The file.
        archive: The archive that contains the file, for messages.

    Raises:
        FatbinError: METADATA is malformed.
    """
    # NOTE: imported here, because doctor loads this module and has no METADATA to read
    from packaging import metadata as packaging  # noqa: PLC0415

    try:
        raw, _ = packaging.parse_email(text)
        homepage = raw.get("home_page") or raw.get("project_urls", {}).get("Homepage", "")
        told = (raw.get("summary", ""), raw.get("license_expression", ""), homepage)
        read = packaging.Metadata.from_raw(raw, validate=False)
        requirements = tuple(read.requires_dist or ())
        return Metadata(text, str(read.version), read.requires_python, requirements, *told)
    except _REFUSALS as error:
        reason = str(error) or "its headers are not understood"
        raise unreadable(NAME, reason, archive=archive) from error


def read_tags(text: bytes) -> tuple[str, ...]:
    """Return the tags of the file WHEEL, unchanged."""
    return tuple(map(str, BytesHeaderParser().parsebytes(text).get_all("Tag", [])))
