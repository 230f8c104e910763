"""Saves a description of a machine to a file, so that doctor can judge the machine elsewhere.

`doctor --save` writes such a record, and `doctor --load` gives the same results for it.

The checks judge one Environment. A record holds that Environment, the options and the selftest
results. User names, host names and secrets are left out.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from ..binaries.json_text import parse_json
from ..checks.environment import (
    EVERYTHING,
    CheckChoice,
    Environment,
)
from ..errors import UsageError
from ..findings.proofs import SELFTEST_NOT_RUN
from ..findings.result import CheckResult
from ..product import NAME, PROGRAM
from ..targets.archs import SESSIONS
from ..version import read_version
from .examine import check_names
from .plain import UnfitError, is_clean, read, require, write

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    from ..machine.libcuda import Gpu
    from ..redaction import Redaction

VERSION: Final = 1
COMMAND: Final = "doctor --save"
LARGEST: Final = 4 << 20  # bytes; the largest build and torch need a few hundred thousand
MOST_GPUS: Final = 64
LINE: Final = 100  # maximum characters of a line of short values or words

_HINT: Final = f"`{PROGRAM} doctor --save FILE` writes one"
_TIME: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2} UTC")
_VERSION: Final = re.compile(r"[0-9A-Za-z.+-]{1,80}")


@dataclass(frozen=True)
class Record:
    """A machine as doctor examined it, with the time and the version of the package."""

    written_by: str = field(metadata={"key": NAME})  # version of the package
    recorded: str  # 2026-11-22 19:44 UTC
    environment: Environment
    choice: CheckChoice = EVERYTHING
    selftest: tuple[CheckResult, ...] = ()

    def __str__(self) -> str:
        return f"recorded elsewhere on {self.recorded} by {NAME} {self.written_by}"

    @property
    def origin(self) -> dict[str, str]:
        """The time of writing, and the version of the package that wrote the record."""
        return {"recorded": self.recorded, NAME: self.written_by}

    @classmethod
    def make(
        cls,
        environment: Environment,
        results: Iterable[CheckResult],
        choice: CheckChoice = EVERYTHING,
        *,
        written_by: str,
        recorded: str,
    ) -> Record:
        """Make a record with the selftest results; `--load` computes the other results again."""
        proven = tuple(
            result
            for result in results
            if (result.name == "agreement" or result.name.startswith("selftest "))
            and result.entry != SELFTEST_NOT_RUN
        )
        return cls(written_by, recorded, environment, choice, proven)

    def side_by_side(self, gpus: Iterable[Gpu]) -> AbstractContextManager[None]:
        """Do nothing: the results are recorded."""
        del gpus
        return nullcontext()

    def run(self, gpu: Gpu) -> CheckResult:
        """Return the recorded selftest result of a GPU."""
        found = self._find(f"selftest {gpu.index}")
        if found is not None:
            return found
        summary = "not run: the record holds no selftest of this GPU"
        return CheckResult("skip", summary, entry=SELFTEST_NOT_RUN)

    def compare_gpus(self) -> CheckResult | None:
        """Return the recorded comparison of GPUs with each other; None if there is none."""
        return self._find("agreement")

    def _find(self, name: str) -> CheckResult | None:
        return next((result for result in self.selftest if result.name == name), None)

    def narrow(self, choice: CheckChoice) -> CheckChoice:
        """Return the checks to run: those that are both recorded and requested.

        Raises:
            UsageError: A requested check is not in the record.
        """
        absent = sorted(name for name in choice.only if name not in self.choice)
        if absent:
            had = [name for name in check_names() if name in self.choice]
            message = f"--only must name checks of the record, {', '.join(had)}, got `{absent[0]}`"
            raise UsageError(message, hint=_HINT)
        return CheckChoice(
            choice.only or self.choice.only,
            choice.skip | self.choice.skip,
            self.choice.devices if choice.devices is None else choice.devices,
        )

    def to_text(self, redaction: Redaction) -> str:
        """Return the record as the text of a file, with every string redacted."""

        def clean(text: str) -> str:
            return _escape(redaction.text(text))

        data = write(Record, self, clean)
        return lay_out({"version": VERSION, "command": COMMAND, **data}) + "\n"

    @classmethod
    def from_text(cls, text: str | bytes, *, source: str) -> Record:
        """Read a record from the text of a file.

        Args:
            text: The text.
            source: Name of the file, for messages.

        Raises:
            UsageError: The text is not a record, or its format is newer than this package.
        """
        by = ""
        try:
            data = _parse(text)
            by = _name_writer(data)
            _require_version(data, by)
            record = read(Record, data, "")
            _require_sane(record)
        except (UnfitError, ValueError, RecursionError) as error:
            reason = "it nests too deep" if isinstance(error, RecursionError) else str(error)
            message = f"`{source}` is not a valid record of doctor: {reason}"
            hint = f"{NAME} {by} wrote it and can read it" if by else _HINT
            raise UsageError(message, hint=hint) from error
        return record  # type: ignore[no-any-return]


def _parse(text: str | bytes) -> dict[str, Any]:
    if len(text) > LARGEST:
        message = f"it must have at most {LARGEST} bytes"
        raise UnfitError(message)
    data = parse_json(text)
    if not isinstance(data, dict) or data.pop("command", None) != COMMAND:
        message = f'it must be an object with "command": "{COMMAND}"'
        raise UnfitError(message)
    return data


def _name_writer(data: dict[str, Any]) -> str:
    """Return the version that wrote a record; empty if it is this version or malformed."""
    by = data.get(NAME)
    known = isinstance(by, str) and _VERSION.fullmatch(by) and by != read_version()
    return str(by) if known else ""


def _require_version(data: dict[str, Any], by: str) -> None:
    """Reject a record whose format has an invalid or later version number."""
    version = data.pop("version", None)
    if type(version) is not int or version < 1:
        message = f"`version` must be {VERSION}"
        raise UnfitError(message)
    if version > VERSION:
        which = f"{NAME} {by}" if by else f"a newer {NAME}"
        message = f"it has version {version}, written by {which}; this reads version {VERSION}"
        raise UnfitError(message)


def _require_sane(record: Record) -> None:
    """Reject data of the right types that doctor never writes."""
    recorded, written_by = record.recorded, record.written_by
    is_time = bool(_TIME.fullmatch(recorded))
    require(is_time, "recorded", "a time such as `2026-11-22 19:44 UTC`", recorded)
    require(bool(_VERSION.fullmatch(written_by)), NAME, "a version", written_by)
    build = record.environment.installed.build
    for archset in build.archsets if build else ():
        if archset.machine not in SESSIONS:
            message = (
                f"an arch set must be for {' or '.join(SESSIONS)}, got `{archset.machine:.60}`"
            )
            raise UnfitError(message)
    for name, gpus in (
        ("cuda", record.environment.cuda.gpus),
        ("host.nvml", record.environment.host.nvml.gpus if record.environment.host else ()),
    ):
        if len(gpus) > MOST_GPUS:
            message = f"`environment.{name}.gpus` must hold at most {MOST_GPUS}, got {len(gpus)}"
            raise UnfitError(message)
    unknown = sorted((record.choice.only | record.choice.skip) - set(check_names()))
    if unknown:
        message = f"`choice` must name checks ({', '.join(check_names())}), got `{unknown[0]}`"
        raise UnfitError(message)


def _escape(text: str) -> str:
    """Replace unprintable characters with Python's escapes."""
    return "".join(
        char if is_clean(char) else char.encode("unicode_escape").decode() for char in text
    )


def lay_out(data: Any, indent: str = "", before: int = 0) -> str:  # noqa: ANN401 - any JSON
    """Format JSON for people: short values on one line, long lists of words wrapped into lines.

    Args:
        data: Plain data.
        indent: Indentation of the line in which the data begins.
        before: Number of characters in that line between the indentation and the data.
    """
    line = json.dumps(data)
    if len(indent) + before + len(line) < LINE or not isinstance(data, (dict, list)) or not data:
        return line
    deeper = f"{indent}  "
    if isinstance(data, dict):
        named = ((f"{json.dumps(name)}: ", one) for name, one in data.items())
        parts = [name + lay_out(one, deeper, len(name)) for name, one in named]
        return _enclose("{", parts, "}", indent)
    if not all(isinstance(one, (str, int)) for one in data):
        return _enclose("[", [lay_out(one, deeper) for one in data], "]", indent)
    lines = [""]
    for word in map(json.dumps, data):
        if lines[-1] and len(deeper) + len(lines[-1]) + len(word) + 2 >= LINE:
            lines.append("")
        lines[-1] += f", {word}" if lines[-1] else word
    return _enclose("[", lines, "]", indent)


def _enclose(begin: str, parts: list[str], end: str, indent: str) -> str:
    inner = f",\n{indent}  ".join(parts)
    return f"{begin}\n{indent}  {inner}\n{indent}{end}"
