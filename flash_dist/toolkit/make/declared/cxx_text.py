"""Reads C++ and CUDA as text: blanks out all but the code, and finds kernels with C names.

The name of a C++ function in an object follows from its namespaces and the types of its arguments.
Only the compiler knows these, so `compile.symbols` compares such names in objects.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Text that holds no code: comments, raw strings, strings and characters. Include names and numbers
# are matched as well, because they may contain `//` or `'`. No two alternatives read the same text.
_NO_CODE: Final = re.compile(
    r"""
    (?P<code> (?:\#|%:)[ \t]*include[ \t]*<[^<>\n]*> | "C" | (?<!\w)[0-9][\w.']*(?<!') )
    | //[^\n]* | /\*(?:.*?\*/|.*)
    | (?<![\w"'])(?:u8|[uUL])?R"(?P<mark>[^()\\\s"]{0,16})\((?:.*?\)(?P=mark)"|.*)
    | "(?:\\.|[^"\\\n])*["\\]? | '(?:\\.|[^'\\\n])*['\\]?
    """,
    re.VERBOSE | re.DOTALL,
)
SPLICE: Final = re.compile(r"\\[ \t\f\v]*\n")  # a line splice, which compilers remove first
_LINKAGE: Final = re.compile(r'extern\s*"C"\s*(\{)?')
_DIRECTIVE: Final = re.compile(r"[ \t]*#[ \t]*(\w*)")
_MACRO: Final = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_ANONYMOUS: Final = re.compile(r"\bnamespace\s*\{")
_ATTRIBUTE: Final = re.compile(r"\b(?:__\w+__|alignas)\s*\(")
_NAME: Final = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def blank_out(text: str) -> str:
    """Replace comments, and the contents of literals except `"C"`, with equally many blanks."""
    return _NO_CODE.sub(_blank, text)


def _blank(found: re.Match[str]) -> str:
    text = found[0]
    if found["code"]:
        return text
    quote = '"' if text.startswith('"') else " "
    return f"{quote}{' ' * (len(text) - 2)}{quote}" if len(text) > 1 else quote


def find_c_kernels(text: str) -> Iterator[str]:
    """Yield the names of kernels that are defined as `extern "C"`.

    Kernels in conditional blocks or anonymous namespaces, and kernels that a macro may name, are
    left out: such kernels may not exist, or may have another name.
    """
    code = blank_out(SPLICE.sub("", text))
    macros = set(_MACRO.findall(code))
    code = _without_anonymous("\n".join(_without_directives(code)))
    for found in _LINKAGE.finditer(code):
        start = found.end()
        end = _end_of(code, start, "{", "}") if found[1] else len(code)
        names = _find_in_block(code[start:end]) if found[1] else _find_definition(code[start:])
        yield from (name for name in names if name not in macros and not name.isupper())


def _without_directives(code: str) -> Iterator[str]:
    """Yield the lines of code outside of conditional blocks, without directives."""
    depth = 0
    for line in code.splitlines():
        directive = _DIRECTIVE.match(line)
        word = directive[1] if directive else ""
        depth += word.startswith("if") - (word == "endif")
        if not directive and depth <= 0:
            yield line


def _without_anonymous(code: str) -> str:
    while found := _ANONYMOUS.search(code):
        code = f"{code[: found.start()]} {code[_end_of(code, found.end(), '{', '}') :]}"
    return code


def _find_in_block(code: str) -> Iterator[str]:
    for found in re.finditer("__global__", code):
        start = max(code.rfind(mark, 0, found.start()) for mark in ";{}") + 1
        yield from _find_definition(code[start:])


def _find_definition(code: str) -> Iterator[str]:
    """Yield the function name at the start of a text, if it is a non-static kernel with a body."""
    head = re.split(r"[;{}]", code, maxsplit=1)[0]
    if "__global__" not in head or re.search(r"\bstatic\b", head):
        return
    code = _without_attributes(code)
    name = _NAME.search(code)
    if name is None:
        return
    rest = code[_end_of(code, name.end(), "(", ")") :]
    if re.match(r"[^;{}(]*\{", rest):  # excludes `NAME(scale)(...)`: a macro makes the name
        yield name[1]


def _without_attributes(code: str) -> str:
    """Remove attributes such as `__launch_bounds__(256)` before the body."""
    while found := _ATTRIBUTE.search(code.partition("{")[0]):
        end = _end_of(code, found.end(), "(", ")")
        code = f"{code[: found.start()]} {code[end:]}"
    return code


def _end_of(code: str, start: int, opening: str, closing: str) -> int:
    """Return the position after the bracket that matches the opening bracket before `start`.

    Without such a bracket, return the length of the code.
    """
    depth = 1
    for place in range(start, len(code)):
        depth += (code[place] == opening) - (code[place] == closing)
        if depth == 0:
            return place + 1
    return len(code)
