"""Parses untrusted JSON strictly: accepts only text that all parsers read in the same way."""

from __future__ import annotations

import json
from typing import Any, Final

_SHOWN: Final = 100  # maximum characters of a name in a message


def parse_json(text: str | bytes) -> Any:  # noqa: ANN401 - any JSON
    """Parse JSON, and reject text that two parsers may read differently.

    Raises:
        ValueError: The text is not JSON, has a key twice in one object, or holds NaN or Infinity.
        RecursionError: The text is nested too deeply.
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
