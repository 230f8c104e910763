"""Build backend (PEP 517) of a project that builds its kernels with this toolkit.

Set `build-backend = "fatwheel.backend"` in pyproject.toml. Hooks run in the project's folder.
"""

from __future__ import annotations

import sys

try:
    from .make.building.backend import (
        build_editable,
        build_sdist,
        build_wheel,
        get_requires_for_build_editable,
        get_requires_for_build_sdist,
        get_requires_for_build_wheel,
        prepare_metadata_for_build_editable,
        prepare_metadata_for_build_wheel,
    )
except ValueError as error:  # such as a malformed [tool.kernels] table
    sys.exit(f"error: {error}")

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]
