"""Results on disk, whole at every moment."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from ..errors import UsageError
from .results import Report

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Any


def write_json(data: Mapping[str, Any], path: Path) -> None:
    """Replace a file at once, so that a reader never sees half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)  # noqa: PTH105 - says what it does


def read_report(path: Path) -> Report:
    """Read a recorded run.

    Raises:
        UsageError: The file is absent or no result of `bench`.
    """
    try:
        return Report.from_json(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        message = f"cannot read `{path}`: {error.strerror}"
        raise UsageError(message) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"`{path}` is no result of `bench`: {error}"
        raise UsageError(message) from error
