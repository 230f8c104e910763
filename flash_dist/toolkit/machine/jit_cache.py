"""Locates the driver's JIT cache, and checks whether the driver can write to it.

Sources: CUDA Programming Guide, "CUDA Environment Variables" (CUDA_CACHE_PATH, by default
`~/.nv/ComputeCache`; CUDA_CACHE_MAXSIZE, by default 1 GiB, 256 MiB on embedded platforms and at
most 4 GiB: larger code is not stored, newer code replaces older).
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..findings.host import (
    JIT_CACHE_DISABLED,
    JIT_CACHE_FULL,
    JIT_CACHE_HOMELESS,
    JIT_CACHE_READ_ONLY,
    JIT_CACHE_SMALL,
)
from ..findings.result import Finding
from ..targets.compatibility import is_set
from ..targets.wording import read_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DEFAULT_LIMIT: Final = 1 << 30

# All kernels of one target are 1.6 MB of SASS (set `all`): this leaves room for growth.
ENOUGH_BYTES: Final = 16 << 20


@dataclass(frozen=True)
class JitCache:
    """The folder of the cache; `absent` means that the driver can create it."""

    folder: str
    status: Literal["writable", "absent", "read-only", "homeless"]
    free_bytes: int | None = None  # None: unknown
    limit_bytes: int = DEFAULT_LIMIT

    def to_json(self) -> dict[str, Any]:
        """Return the cache as plain data."""
        return {**vars(self), "folder": self.folder or None}


def read_jit_cache(
    environ: Mapping[str, str],
    root: Path = Path("/"),
    may_use: Callable[[Path, int], bool] = os.access,
) -> JitCache:
    """Examine the folder without creating it."""
    limit = read_limit(environ.get("CUDA_CACHE_MAXSIZE", ""))
    folder = environ.get("CUDA_CACHE_PATH", "")
    if not folder and environ.get("HOME"):
        folder = f"{environ['HOME']}/.nv/ComputeCache"
    if not folder:
        return JitCache("", "homeless", limit_bytes=limit)
    place = root / Path(folder).absolute().relative_to("/")
    nearest = next((path for path in (place, *place.parents) if _exists(path)), root)
    if not nearest.is_dir() or not may_use(nearest, os.R_OK | os.W_OK | os.X_OK):
        return JitCache(folder, "read-only", limit_bytes=limit)
    status: Literal["writable", "absent"] = "writable" if nearest == place else "absent"
    return JitCache(folder, status, _read_free(nearest), limit)


def find_cache_problem(variables: Mapping[str, str], cache: JitCache | None) -> Finding | None:
    """Say what prevents caching; None if nothing does, or if it was not examined."""
    if is_set(variables, "CUDA_CACHE_DISABLE"):
        fix = "`unset CUDA_CACHE_DISABLE`"
        return Finding(JIT_CACHE_DISABLED, "CUDA_CACHE_DISABLE is set", fix=fix)
    limit = read_limit(variables.get("CUDA_CACHE_MAXSIZE", ""))
    if limit < ENOUGH_BYTES:
        reason = f"CUDA_CACHE_MAXSIZE={limit} is too small a cache for the compiled kernels"
        fix = f"`unset CUDA_CACHE_MAXSIZE`, or set it to {ENOUGH_BYTES} or more"
        return Finding(JIT_CACHE_SMALL, reason, fix=fix)
    return None if cache is None else _find_folder_problem(cache)


def _find_folder_problem(cache: JitCache) -> Finding | None:
    fix = "`export CUDA_CACHE_PATH=/path/to/folder` sets a writable folder with free space"
    if cache.status == "homeless":
        reason = "the JIT cache has no folder, as neither HOME nor CUDA_CACHE_PATH is set"
        return Finding(JIT_CACHE_HOMELESS, reason, fix=fix)
    if cache.status == "read-only":
        reason = f"the JIT cache {cache.folder} is not writable"
        return Finding(JIT_CACHE_READ_ONLY, reason, fix=fix)
    if cache.free_bytes is not None and cache.free_bytes < ENOUGH_BYTES:
        free = f"{cache.free_bytes >> 20} MiB free"
        reason = f"the JIT cache {cache.folder} is on a full disk ({free})"
        return Finding(JIT_CACHE_FULL, reason, fix=fix)
    return None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # below a folder that we may not enter
        return False


def _read_free(folder: Path) -> int | None:
    """Return the free bytes; None if the file system does not tell."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return None
    return usage.free if usage.total else None


def read_limit(text: str) -> int:
    """Read a number of bytes; return the default for malformed text."""
    number = read_whole(text.strip())
    return DEFAULT_LIMIT if number is None else number
