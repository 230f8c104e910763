"""The keys of `[tool.kernels]` and of the files that it names, with their valid values."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from ...errors import KernelsError, show
from ...product import CAPABILITY, PACKAGE_NAME, TABLE, parse_toml
from ...targets.axes import RULES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from pathlib import Path

PLACE: Final = f"[tool.{TABLE}]"
FIRST_SECOND: Final = 315532800  # 1980-01-01; zip files allow times up to 2107-12-31
LAST_SECOND: Final = 4354819199

_LINE: Final = re.compile(r"[^\x00-\x1f\x7f]*[^\s\x00-\x1f\x7f][^\x00-\x1f\x7f]*")
_NUMBER: Final = "(0|[1-9][0-9]{0,8})"
_VERSION: Final = re.compile(
    rf"{_NUMBER}(\.{_NUMBER})*((a|b|rc){_NUMBER})?(\.post{_NUMBER})?(\.dev{_NUMBER})?"
)
_RELEASE: Final = re.compile(rf"[1-9][0-9]{{0,3}}\.{_NUMBER}")
_ADDRESS: Final = re.compile(r"(https?|file)://[^\s\x00-\x1f\x7f]+")
_PART: Final = "[A-Za-z_][A-Za-z0-9_]{0,80}"
_MODULE: Final = re.compile(rf"{_PART}(\.{_PART}){{0,9}}")
_FUNCTION: Final = re.compile(rf"{_MODULE.pattern}:{_PART}")
_LABEL: Final = re.compile("[a-z0-9]{1,10}")
_ROLE: Final = re.compile("[a-z][a-z0-9_]{0,60}")
_FLAG: Final = re.compile(r'[^\x00-\x1f\x7f;\\"$]*[^\s\x00-\x1f\x7f;\\"$][^\x00-\x1f\x7f;\\"$]*')
_TYPE: Final = re.compile("[A-Za-z_][A-Za-z0-9_]*(::[A-Za-z_][A-Za-z0-9_]*)*")
_WORD: Final = re.compile("[a-z]+[0-9]+")


class DeclarationError(KernelsError, ValueError):
    """An error in [project], in [tool.kernels] or a file that it names, or in SOURCE_DATE_EPOCH."""


@dataclass(frozen=True)
class Kind:
    """The valid values of a key."""

    told: str  # description of the valid values, for errors
    example: str  # a value in TOML, for a hint
    find_fault: Callable[[object], str]  # describes what is wrong with a value; "" if it is valid


def _text(told: str, example: str, pattern: re.Pattern[str] = _LINE) -> Kind:
    def find_fault(value: object) -> str:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return "" if _fits(value, pattern) else f"{'the number ' if number else ''}{spell(value)}"

    return Kind(told, example, find_fault)


def _fits(value: object, pattern: re.Pattern[str]) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _list(
    told: str, example: str, fits: Callable[[object], bool], *, may_be_empty: bool = False
) -> Kind:
    def find_fault(value: object) -> str:
        if not isinstance(value, list) or not (value or may_be_empty):
            return spell(value)
        wrong = [one for one in value if not fits(one)]
        return f"{spell(wrong[0])} in it" if wrong else ""

    return Kind(told, example, find_fault)


def _texts(
    told: str, example: str, pattern: re.Pattern[str] = _LINE, *, may_be_empty: bool = False
) -> Kind:
    return _list(told, example, lambda one: _fits(one, pattern), may_be_empty=may_be_empty)


def _number(told: str, example: str, least: float, most: float, *, whole: bool = True) -> Kind:
    def find_fault(value: object) -> str:
        fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        return "" if fits and least <= value <= most else spell(value)  # type: ignore[operator]

    return Kind(told, example, find_fault)


def _table(told: str, example: str) -> Kind:
    return Kind(told, example, lambda value: "" if isinstance(value, dict) else spell(value))


def _tables(told: str, example: str, *, may_be_empty: bool = False) -> Kind:
    return _list(told, example, lambda one: isinstance(one, dict), may_be_empty=may_be_empty)


def _or_path(kind: Kind) -> Kind:
    """Return a kind that also allows a path."""

    def find_fault(value: object) -> str:
        return "" if _fits(value, _LINE) else kind.find_fault(value)

    return Kind(f"{kind.told} or a path", kind.example, find_fault)


def spell(value: object, most: int = 60) -> str:
    """Spell a value as in TOML, on one line, cut after `most` characters, in backticks."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"`{show(value)}`"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # thousands of digits, or of nested lists
        text = f"a {type(value).__name__}"
    return f"`{text}`" if len(text) <= most else f"`{text[:most]}...`"


_RULES: Final = ", ".join(RULES[:-1]) + f" or {RULES[-1]}"
_IDENTIFIER: Final = "a name of C++ such as"

KEYS: Final[dict[str, dict[str, Kind]]] = {
    "kernels": {
        "version": _text("a version such as `0.1.0`", '"0.1.0"', _VERSION),
        "package": _text(
            "a name such as `my_norms`, of at most 41 characters", '"my_norms"', PACKAGE_NAME
        ),
        "namespace": _text(
            "a name of C++ such as `my_norms_kernels`", '"my_norms_kernels"', PACKAGE_NAME
        ),
        "product": _text("a path", '"my_norms/product.json"'),
        "sets": _or_path(_table("a table", '{ all = "8.0+PTX;9.0a" }')),
        "binding": _texts("a list of paths", '["csrc/binding.cpp"]', may_be_empty=True),
        "include": _texts("a list of folders", '["csrc"]', may_be_empty=True),
        "torch_min": _text("a release such as `2.10`", '"2.10"', _RELEASE),
        "torch_tested_max": _text("a release such as `2.15`", '"2.15"', _RELEASE),
        "dependencies": _texts("a list of requirements", '["numpy>=1.26"]', may_be_empty=True),
        "toolkit": _text("a release of CUDA such as `13.0`", '"13.0"', _RELEASE),
        "oldest_gpu": _text("a compute capability such as `8.0`", '"8.0"', CAPABILITY),
        "operators": _text("a module of the package such as `ops`", '"ops"', _MODULE),
        "index": _text(
            "an address that starts with https://, http:// or file://",
            '"https://wheels.my-norms.dev/"',
            _ADDRESS,
        ),
        "source_date_epoch": _number(
            f"a number of seconds from {FIRST_SECOND} (1980) to {LAST_SECOND} (2107), which a zip "
            "file can hold",
            "1767225600",
            FIRST_SECOND,
            LAST_SECOND,
        ),
        "hub_card": _text("a path", '"hub_card.md"'),
        "sources": _tables("a list of tables", '[{ files = ["csrc/*.cu"] }]'),
        "dispatch": _table("a table", '{ table = "csrc/kernels.toml" }'),
        "gates": _table("a table", "{ wheel_mb = 10 }"),
        "selftest": _table("a table", '{ cases = "selftest:load_cases" }'),
    },
    "sources": {
        "files": _texts("a list of paths", '["csrc/*.cu"]'),
        "targets": _texts("a list of targets such as `9.0a`", '["9.0a"]'),
        "flags": _texts(
            'a list of flags of nvcc without `;`, `"`, `$` and a backslash',
            '["--use_fast_math"]',
            _FLAG,
            may_be_empty=True,
        ),
    },
    "dispatch": {
        "table": _text("a path", '"csrc/kernels.toml"'),
        "host": _texts("a list of paths", '["csrc/host/*.cpp"]', may_be_empty=True),
        "axes": _tables(
            "a list of tables", '[{ name = "hidden", rule = "holds" }]', may_be_empty=True
        ),
        "main_role": _text("a name such as `rms`", '"rms"', _ROLE),
    },
    "gates": {
        "wheel_mb": _number("a number of MB above 0", "10", 1e-6, 1e6, whole=False),
        "spills": _or_path(_tables("a list of tables", "[]", may_be_empty=True)),
        "tests": _texts("a list of paths", '["tests"]', may_be_empty=True),
    },
    "selftest": {
        "cases": _text(
            "a function of the package such as `selftest:load_cases`",
            '"selftest:load_cases"',
            _FUNCTION,
        ),
    },
    "set": {
        "archs": _text(
            "a TORCH_CUDA_ARCH_LIST such as `8.0+PTX;9.0a`",
            '"8.0+PTX;9.0a"',
            re.compile(r"[A-Za-z0-9_.+; ]{1,250}"),
        ),
        "who": _text("a line of text", '"H100, H200"'),
        "toolkit": _text("a release of CUDA such as `13.0`", '"13.0"', _RELEASE),
        "machine": _text("`x86_64` or `aarch64`", '"aarch64"', re.compile("x86_64|aarch64")),
        "label": _text("1 to 10 characters a-z or 0-9", '"hopper"', _LABEL),
        "budget_mb": _number("a number of MB above 0", "10", 1e-6, 1e6, whole=False),
    },
    "spill": {
        "symbol": _text("a pattern of kernels such as `*_bwd_*`", '"*_bwd_*"'),
        "spill_bytes": _number("a number of bytes above 0", "64", 1, 1 << 31),
        "reason": _text("a line of text", '"measured: spilling costs 1 %"'),
    },
    "axis": {
        "name": _text("a name such as `hidden`", '"hidden"', re.compile("[a-z][a-z0-9_]{0,30}")),
        "rule": _text(_RULES, '"holds"', re.compile("|".join(RULES))),
        "symbol": _text("a spelling such as `d{}`", '"d{}"', re.compile(r"[a-z_]{0,15}\{\}")),
        "default": _text("the name of an axis before it", '"head_dim"'),
        "words": _table("a table of words", '{ bf16 = { floor = "8.0" } }'),
        "floors": _table("a table of compute capabilities by number", '{ 384 = "8.0" }'),
    },
    "word": {
        "floor": _text("a compute capability such as `8.0`", '"8.0"', CAPABILITY),
        "part_of": _text("another word of the axis", '"fp32"', _WORD),
    },
    "spill_file": {
        "exception": _tables("a list of tables", "[]", may_be_empty=True),
    },
    "kernel_table": {
        "own_headers": _text("a path", '"headers.py"'),
        "defaults": _table("a table", '{ dtype = ["fp16"] }'),
        "smem_plans": _table("a table of bytes by KB", "{ 0 = 49152 }"),
        "stand_ins": _table("a table of roles", '{ fused = ["first", "second"] }'),
        "family": _tables("a list of tables", "[[family]]"),
    },
    "family": {
        "name": _text("a name such as `rms`", '"rms"', _ROLE),
        "role": _text("a name such as `rms`", '"rms"', _ROLE),
        "targets": _texts("a list of targets such as `9.0a`", '["9.0a"]'),
        "header": _text("the path of a header", '"rms/fwd.cuh"'),
        "config": _text(f"{_IDENTIFIER} `RmsConfig`", '"RmsConfig"', _TYPE),
        "kernel": _text(f"{_IDENTIFIER} `rms_block`", '"rms_block"', _TYPE),
        "params": _text(f"{_IDENTIFIER} `RmsParams`", '"RmsParams"', _TYPE),
        "launch": _text(f"{_IDENTIFIER} `launch_rms`", '"launch_rms"', _TYPE),
        "refuses": _text(f"{_IDENTIFIER} `refuse_rms`", '"refuse_rms"', _TYPE),
        "leaves_half_filled": Kind(
            "true or false", "true", lambda one: "" if isinstance(one, bool) else spell(one)
        ),
        "plans": _text("the name of a header", '"plans.h"', re.compile(r"\w+\.(h|cuh)")),
        "rows": _tables("a list of tables", "[{ hidden = 256, plan = 0 }]"),
    },
}


def require_keys(
    table: object, kind: str, where: str, needed: Collection[str] = (), others: Collection[str] = ()
) -> Mapping[str, Any]:
    """Return a table after checking its keys and values.

    Args:
        table: The value to check.
        kind: The kind of table, which decides the valid keys.
        where: The name of the table in errors.
        needed: Required keys.
        others: Further keys, with any value.

    Raises:
        DeclarationError: A key is unknown or missing, or has a wrong value.
    """
    if not isinstance(table, dict):
        message = f"{where} must be a table, got {spell(table)}"
        raise DeclarationError(message, hint=f"its keys are {', '.join(KEYS[kind])}")
    known = KEYS[kind]
    for key, value in table.items():
        if key in others:
            continue
        if key not in known:
            raise _unknown(key, (*known, *others), where)
        fault = known[key].find_fault(value)
        if fault:
            message = f"`{key}` of {where} must be {known[key].told}, got {fault}"
            raise DeclarationError(message, hint=f"for example `{key} = {known[key].example}`")
    for key in needed:
        if key not in table:
            message = f"{where} lacks `{key}`, {known[key].told}"
            raise DeclarationError(message, hint=f"for example `{key} = {known[key].example}`")
    return table


def _unknown(key: str, known: Collection[str], where: str) -> DeclarationError:
    near = get_close_matches(key, known, 1)
    message = f"{where} has an unknown key {spell(key)}"
    hint = f"did you mean `{near[0]}`?" if near else f"its keys are {', '.join(known)}"
    return DeclarationError(message, hint=hint)


def read_toml_file(path: Path, name: str) -> dict[str, Any]:
    """Read a TOML file.

    Args:
        path: The file.
        name: The name of the file in errors.

    Raises:
        DeclarationError: The file is absent, not UTF-8 or not TOML.
    """
    try:
        return parse_toml(path.read_bytes().decode("utf-8"))
    except OSError as error:
        message = f"cannot read `{name}`: {error.strerror or error}"
        raise DeclarationError(message, hint="check the path, and who may read the file") from error
    except UnicodeDecodeError as error:
        message = f"cannot read `{name}`: byte {error.start} is no UTF-8"
        raise DeclarationError(message, hint="save the file as UTF-8") from error
    except (ValueError, RecursionError) as error:
        marked = path.read_bytes().startswith(b"\xef\xbb\xbf")
        reason = "it begins with a byte order mark" if marked else " ".join(str(error).split())
        hint = "save the file as UTF-8 without BOM" if marked else "TOML is described on toml.io"
        message = f"cannot read `{name}`: {reason:.200}"
        raise DeclarationError(message, hint=hint) from error


def read_json_file(path: Path, name: str) -> dict[str, Any]:
    """Read a JSON file that contains an object.

    Args:
        path: The file.
        name: The name of the file in errors.

    Raises:
        DeclarationError: The file is absent, not UTF-8, or not a JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        message = f"cannot read `{name}`: {reason}"
        raise DeclarationError(message, hint="save the file as UTF-8, without BOM") from error
    if not isinstance(found, dict):
        message = f"`{name}` must be an object of JSON, got {spell(found)}"
        raise DeclarationError(message, hint="it begins with `{`")
    return found
