"""JSON that others wrote, read in the one way that every reader reads it in."""

from __future__ import annotations

import json
from typing import Any, Final

_SHOWN: Final = 100  # characters of a name


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON, and refuse what two readers may take for two things.

    Raises:
        ValueError: It is no JSON, an object has a name twice, or a number is none of JSON's.
        RecursionError: It nests too deep.
    """
    return json.loads(text, object_pairs_hook=_require_unique, parse_constant=_refuse_constant)


def _require_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for name, value in pairs:
        if name in data:
            message = f"duplicate key `{name[:_SHOWN]}` in one object"
            raise ValueError(message)
        data[name] = value
    return data


def _refuse_constant(name: str) -> None:
    message = f"`{name}` is not a JSON number"
    raise ValueError(message)
