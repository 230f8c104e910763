"""Adds `info/link.json`, which lists the console scripts of a wheel, to its conda package.

rattler-build's `assemble_package` has no argument for link.json, so the archive of the package's
metadata is rewritten with one more member.
"""

from __future__ import annotations

import io
import json
import sys
import tarfile
import zipfile
from typing import TYPE_CHECKING

from ...builds.entry_points import LINK, make_link

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


def add_link(path: Path, scripts: Sequence[str]) -> None:
    """Add link.json, from which conda clients create the console scripts on installation."""
    if not scripts:
        return
    with zipfile.ZipFile(path) as archive:
        members = [(one, archive.read(one)) for one in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for old, data in members:
            one = zipfile.ZipInfo(old.filename, old.date_time)  # no extra fields
            one.external_attr = old.external_attr
            archive.writestr(one, _add_to_info(data, scripts) if _is_info(one) else data)


def _is_info(one: zipfile.ZipInfo) -> bool:
    return one.filename.startswith("info-")


def _add_to_info(packed: bytes, scripts: Sequence[str]) -> bytes:
    """Return the archive with link.json appended, dated like the member before it."""
    text, out = json.dumps(make_link(scripts), indent=2).encode(), io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(zstd.decompress(packed))) as old,
        tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as new,
    ):
        for member in old:
            new.addfile(member, old.extractfile(member))
        link = tarfile.TarInfo(LINK)
        link.size, link.mtime, link.mode = len(text), member.mtime, 0o644
        new.addfile(link, io.BytesIO(text))
    changed: bytes = zstd.compress(out.getvalue())
    return changed
