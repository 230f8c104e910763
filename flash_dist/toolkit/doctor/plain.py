"""Converts frozen values to plain data for JSON and back, by the types of their fields.

Fields with their default value are left out, and new fields need no change here. The input is not
trusted: a value that does not fit its type is rejected, with its place in the document.
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from ..binaries.codecs import Codec
from ..errors import ArchError
from ..findings import FINDINGS, Entry
from ..gpucode.images import FatbinReport
from ..targets.archs import Arch, ArchSet
from ..targets.devices import Device, format_version, parse_version
from ..targets.fallbacks import Fallbacks
from ..targets.gpus import Version
from ..targets.verdict import Build, Variant
from .folded import FoldedBuild, FoldedReport, FoldedVariant

Clean = Callable[[str], str]

# Names in annotations that modules import only under TYPE_CHECKING.
_NAMES: Final = {
    **{one.__name__: one for one in (Arch, ArchSet, Build, Entry, Fallbacks, FatbinReport)},
    "Codec": Codec,
    "Mapping": Mapping,
    "Version": Version,
}
_FOLDED: Final[dict[type, Any]] = {
    Build: FoldedBuild,
    FatbinReport: FoldedReport,
    Variant: FoldedVariant,
}

# For text fields that are parsed later, by name: the pattern of the text, and its description.
_PATTERNS: Final = {
    "toolkit": (re.compile(r"[0-9]+\.[0-9]+(\.[0-9]+)*|"), "a version such as `13.0`"),
    "module_release": (re.compile(r"[0-9]+(\.[0-9]+)*|"), "a release such as `580.65.06`"),
    "machine": (re.compile(r"\w+"), "a kind of CPU such as `x86_64`"),
}

_MOST: Final = 1 << 63  # larger than any number in a record
_DEEPEST: Final = 12  # maximum nesting of `CheckResult.data`
_SHOWN: Final = 60  # maximum characters of a rejected value in messages


class UnfitError(ValueError):
    """Data that does not fit its type. The message names the place in the document."""


def _find_entry(name: str) -> Entry:
    entry = FINDINGS.get(name)
    if entry is None:
        message = f"it is not one of the {len(FINDINGS)} ids"
        raise ValueError(message)
    return entry


# Types that are written as one word, each with the functions that write and read it, and a
# description of the word.
_WORDS: Final[dict[Any, tuple[Callable[[Any], str], Callable[[str], Any], str]]] = {
    Arch: (str, Arch.parse, "a target such as `sm_90a`"),
    Device: (str, Device.parse, "a compute capability such as `8.6`"),
    Version: (format_version, parse_version, "a version such as `12.8`"),
    Entry: (lambda entry: str(entry.id), _find_entry, "the id of a finding"),
}


def write(kind: Any, value: Any, clean: Clean) -> Any:  # noqa: ANN401, PLR0911 - a type and a value
    """Return a value of this type as plain data; apply `clean` to every free text."""
    kind = _without_none(kind)
    if value is None or get_origin(kind) is Literal:
        return value
    if kind in _WORDS:
        return _WORDS[kind][0](value)
    if kind in _FOLDED:
        kind = _FOLDED[kind]
        value = kind.fold(value)
    if isinstance(kind, type) and is_dataclass(kind):
        return {
            _key(field): write(hint, getattr(value, field.name), clean)
            for field, hint in _fields(kind)
            if getattr(value, field.name) != _default(field)
        }
    if kind is str or isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        of = get_args(kind)[1] if get_args(kind) else Any
        return {clean(str(name)): write(of, one, clean) for name, one in value.items()}
    if isinstance(value, (tuple, list, frozenset)):
        of = get_args(kind)[0] if get_args(kind) else Any
        ordered = sorted(value) if isinstance(value, frozenset) else value
        return [write(of, one, clean) for one in ordered]
    return value


def read(kind: Any, data: Any, place: str) -> Any:  # noqa: ANN401, PLR0911 - a type and a value
    """Convert plain data back to a value; the reverse of `write`.

    Args:
        kind: The type of the value.
        data: The parsed JSON.
        place: The place of the data in the document, for messages.

    Raises:
        UnfitError: The data is not of this type.
    """
    if data is None and kind != _without_none(kind):
        return None
    kind = _without_none(kind)
    origin, args = get_origin(kind), get_args(kind)
    if origin is Literal:
        require(data in args and isinstance(data, str), place, " or ".join(args), data)
        return data
    if kind in _WORDS:
        return _read_word(kind, data, place)
    if kind in _FOLDED:
        return _unfold(read(_FOLDED[kind], data, place), place)
    if isinstance(kind, type) and is_dataclass(kind):
        return _read_fields(kind, data, place)
    if origin in {tuple, frozenset}:
        require(isinstance(data, list), place, "a list", data)
        return origin(read(args[0], one, f"{place}[{n}]") for n, one in enumerate(data))
    if origin is Mapping:
        require(isinstance(data, dict), place, "an object", data)
        return {_text(name, place): read(args[1], data[name], f"{place}.{name}") for name in data}
    return _read_simple(kind, data, place)


def _read_simple(kind: Any, data: Any, place: str) -> Any:  # noqa: ANN401 - as above
    if kind is str:
        return _text(data, place)
    if kind is bool:
        require(isinstance(data, bool), place, "true or false", data)
    elif kind is int:
        whole = isinstance(data, int) and not isinstance(data, bool)
        require(whole and 0 <= data < _MOST, place, "a whole number from 0 on", data)
    else:
        _require_plain(data, place, _DEEPEST)
    return data


def _read_word(kind: Any, data: Any, place: str) -> Any:  # noqa: ANN401 - as above
    _, parse, words = _WORDS[kind]
    try:
        return parse(_text(data, place))
    except (ArchError, ValueError):
        require(False, place, words, data)  # noqa: FBT003 - always fails


def _read_fields(kind: type, data: Any, place: str) -> Any:  # noqa: ANN401 - as above
    require(isinstance(data, dict), place, "an object", data)
    values, known = {}, set()
    for field, hint in _fields(kind):
        key = _key(field)
        known.add(key)
        within = f"{place}.{key}" if place else key
        if key in data:
            values[field.name] = one = read(hint, data[key], within)
            pattern, words = _PATTERNS.get(field.name, (None, ""))
            require(
                pattern is None or one is None or bool(pattern.fullmatch(one)), within, words, one
            )
        elif _default(field) is MISSING:
            message = f"`{within}` is missing"
            raise UnfitError(message)
    unknown = [name for name in data if name not in known]
    if unknown:
        message = f"`{_short(unknown[0])}`{f' in `{place}`' if place else ''} is not known"
        raise UnfitError(message)
    return kind(**values)


def _unfold(folded: Any, place: str) -> Any:  # noqa: ANN401 - an instance of its class
    try:
        return folded.unfold()
    except ValueError as error:
        message = f"`{place}` {error}"
        raise UnfitError(message) from None


def _require_plain(data: Any, place: str, levels: int) -> None:  # noqa: ANN401 - any JSON
    """Raise UnfitError for deep nesting, a control character, or a huge or non-finite number."""
    if isinstance(data, str):
        _text(data, place)
    elif isinstance(data, (dict, list)):
        require(levels > 0, place, "less deep", "...")
        for name in data if isinstance(data, dict) else ():
            _text(name, place)
        for one in data.values() if isinstance(data, dict) else data:
            _require_plain(one, place, levels - 1)
    elif data is not None:
        require(math.isfinite(data) and abs(data) < _MOST, place, "a finite number", data)


def _text(data: Any, place: str) -> str:  # noqa: ANN401 - checked here
    require(isinstance(data, str), place, "a text", data)
    require(is_clean(data), place, "a text without control characters", data)
    return str(data)


def is_clean(text: str) -> bool:
    """Tell if a text contains only printable characters and newlines."""
    return all(char.isprintable() or char == "\n" for char in text)


def require(fits: bool, place: str, wanted: str, got: Any) -> None:  # noqa: ANN401, FBT001
    """Raise UnfitError, which says what is wanted at `place`, unless `fits` is True."""
    if not fits:
        message = f"`{place}` must be {wanted}, got `{_short(got)}`"
        raise UnfitError(message)


def _short(data: Any) -> str:  # noqa: ANN401 - whatever was given
    if isinstance(data, (dict, list)):
        return "an object" if isinstance(data, dict) else "a list"
    text = str(data) if not isinstance(data, int) or abs(data) < _MOST else "a huge number"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@cache
def _fields(kind: type) -> tuple[tuple[Field[Any], Any], ...]:
    hints = get_type_hints(kind, localns=_NAMES)
    return tuple((field, hints[field.name]) for field in fields(kind))


def _key(field: Field[Any]) -> str:
    """Return a field's name in the file: its metadata `key`, or else its own name."""
    return str(field.metadata.get("key", field.name))


def _default(field: Field[Any]) -> Any:  # noqa: ANN401 - of any type
    """Return the default of a field; MISSING if it has none."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _without_none(kind: Any) -> Any:  # noqa: ANN401 - a type
    """Return X for `X | None`; other types unchanged."""
    if get_origin(kind) not in {Union, types.UnionType}:
        return kind
    (one,) = (each for each in get_args(kind) if each is not types.NoneType)
    return one
