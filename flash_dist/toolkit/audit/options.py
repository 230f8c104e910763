"""Options of `audit`, from the command line or from `[tool.NAME.audit]` in pyproject.toml."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import UsageError, wrong_usage
from ..product import NAME
from ..targets.archs import ArchSet
from ..targets.devices import Driver
from .requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

TABLE: Final = f"tool.{NAME}.audit"
_HINT: Final = "run `audit` in another folder, if that file is not for it"
_FLAGS: Final = ("forbid-extra", "headers-only")
_SIZE: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kMG]?|[KMG]i)B?")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30}


@dataclass(frozen=True)
class AuditOptions:
    """The options as the user wrote them; None for options that are not given."""

    require: str | None = None
    forbid_extra: bool | None = None
    require_kernels: str | None = None
    no_stubs: str | None = None
    max_size: str | None = None
    min_driver: str | None = None
    baseline: str | None = None
    allow_missing: str | None = None
    headers_only: bool | None = None
    policies: tuple[tuple[str, AuditOptions], ...] = ()  # library pattern, options

    def over(self, others: AuditOptions) -> AuditOptions:
        """Return these options; an option that is not set here has the value in `others`."""
        given = {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) not in {None, ()}
        }
        return replace(others, **given)

    def parse(self) -> Requirements:
        """Return the requirements.

        Raises:
            UsageError: An option is malformed, or contradicts or lacks another option.
        """
        if self.forbid_extra and not self.require:
            message = "--forbid-extra must come with --require, which says what is no extra"
            raise UsageError(message, hint="`audit --require '8.0;9.0a' --forbid-extra WHEEL`")
        if self.allow_missing is not None and not self.require:
            message = "--allow-missing must come with --require, which says what may be missing"
            raise UsageError(
                message, hint="`audit --require '8.0;9.0a' --allow-missing REGEX WHEEL`"
            )
        if self.headers_only and self.allow_missing is not None:
            message = "--headers-only reads no names of kernels, which --allow-missing needs"
            raise UsageError(message, hint="leave one of the two out")
        if self.headers_only and (self.require_kernels or self.no_stubs):
            message = "--headers-only reads no kernels, which --require-kernels and --no-stubs need"
            raise UsageError(message, hint="leave --headers-only out")
        return Requirements(
            archs=_parse_archs(self.require),
            forbid_extra=bool(self.forbid_extra),
            kernels=_read_kernels(self.require_kernels),
            no_stubs=_parse_pattern(self.no_stubs, "--no-stubs"),
            max_bytes=None if self.max_size is None else parse_size(self.max_size),
            min_driver=_parse_driver(self.min_driver),
            allow_missing=_parse_pattern(self.allow_missing, "--allow-missing"),
            headers_only=bool(self.headers_only),
            policies=tuple(
                (pattern, one.over(replace(self, policies=())).parse())
                for pattern, one in self.policies
            ),
        )


OPTIONS: Final = tuple(one.name for one in fields(AuditOptions) if one.name != "policies")
NAMES: Final = tuple(name.replace("_", "-") for name in OPTIONS)
# Keys of a table for some libraries; the other keys are for the whole release.
OF_LIBRARIES: Final = ("require", "forbid-extra", "allow-missing", "no-stubs", "min-driver")


def read_options(path: Path) -> AuditOptions:
    """Read `[tool.NAME.audit]` in a pyproject.toml; an absent file sets no options.

    Raises:
        UsageError: The file cannot be read, or has an unknown key or value.
    """
    if not path.is_file():
        return AuditOptions()
    table = _find_table(path)
    tables = {key: value for key, value in table.items() if isinstance(value, dict)}
    options = {key: value for key, value in table.items() if key not in tables}
    policies = tuple(
        (pattern, _read_table(one, f'[{TABLE}."{pattern}"] in `{path}`', OF_LIBRARIES))
        for pattern, one in tables.items()
    )
    return replace(_read_table(options, f"[{TABLE}] in `{path}`", NAMES), policies=policies)


def _read_table(table: Mapping[str, Any], place: str, allowed: tuple[str, ...]) -> AuditOptions:
    for key, value in table.items():
        if key not in allowed:
            message = f"{place} has no `{key}`"
            raise UsageError(message, hint=f"it understands {', '.join(allowed)}")
        wanted = bool if key in _FLAGS else str
        if not isinstance(value, wanted):
            message = f"`{key}` of {place} must be a {wanted.__name__}, got {value!r}"
            raise UsageError(message)
    return AuditOptions(**{key.replace("-", "_"): value for key, value in table.items()})


def _find_table(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read `{path}`: {reason}"
        raise UsageError(message, hint=_HINT) from error
    if f"[{TABLE}" not in text:
        return {}
    try:
        if sys.version_info >= (3, 11):
            import tomllib  # noqa: PLC0415
        else:
            import tomli as tomllib  # noqa: PLC0415
    except ImportError as error:
        message = f"[{TABLE}] in `{path}` cannot be read: Python 3.10 has no TOML reader"
        raise UsageError(message, hint="`pip install tomli`") from error
    try:
        table: Any = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        message = f"`{path}` is no TOML: {error}"
        raise UsageError(message) from error
    for name in TABLE.split("."):
        table = table.get(name, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def parse_size(text: str) -> int:
    """Return the number of bytes in a size such as `100MB`, `1.5 GiB` or `100000000`."""
    match = _SIZE.fullmatch(text.strip())
    size = math.inf if match is None else float(match[1]) * _UNITS[match[2]]
    if size == math.inf:
        message = f"a size must be like 100MB, 95MiB or 100000000, got `{text:.60}`"
        raise UsageError(message)
    return int(size)


def _parse_archs(text: str | None) -> tuple[Any, ...]:
    with wrong_usage():
        return () if text is None else ArchSet.parse(text, name="--require").archs


def _read_kernels(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"cannot read required kernels from `{path}`: {error}"
        raise UsageError(message) from error
    names = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not names:
        message = f"`{path}` names no kernel that is required"
        raise UsageError(message, hint="write a name, or a part of one, on each line")
    return names


def _parse_pattern(text: str | None, option: str) -> re.Pattern[str] | None:
    if not text:
        if text is None:
            return None
        message = f"{option} must be a regular expression, got an empty one, which all names match"
        raise UsageError(message, hint="`.` is all names")
    try:
        return re.compile(text)
    except re.error as error:
        message = f"{option} must be a regular expression, got `{text}`: {error}"
        raise UsageError(message) from error


def _parse_driver(text: str | None) -> Driver | None:
    with wrong_usage():
        return None if text is None else Driver.parse(text)
