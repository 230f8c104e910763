"""Finds the kernels with C names in the text of a CUDA file."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

# Comments, raw strings, strings and characters, which hold no code except "C".
_NO_CODE: Final = re.compile(
    r'//(?:\\\n|[^\n])*|/\*.*?(?:\*/|\Z)|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"'
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""",
    re.DOTALL,
)
_LINKAGE: Final = re.compile(r'extern\s*"C"\s*(\{)?')
_ATTRIBUTE: Final = re.compile(r"\b(?:__\w+__|alignas)\s*\(")
_NAME: Final = re.compile(r"\b([A-Za-z_]\w*)\s*\(")


def find_c_kernels(text: str) -> Iterator[str]:
    """Yield the names of kernels that are declared `extern "C"`."""
    code = _NO_CODE.sub(lambda found: found[0] if found[0] == '"C"' else " ", text)
    for found in _LINKAGE.finditer(code):
        start = found.end()
        if found[1]:
            yield from _find_in_block(code[start : _end_of(code, start, "{", "}")])
        else:
            yield from _find_definition(code[start:])


def _find_in_block(code: str) -> Iterator[str]:
    for found in re.finditer(r"__global__", code):
        yield from _find_definition(code[found.start() :])


def _find_definition(code: str) -> Iterator[str]:
    """Yield the function name at the start of a text, if it is a kernel with a body."""
    head = re.split(r"[;{}]", code, maxsplit=1)[0]
    if "__global__" not in head:
        return
    code = _without_attributes(code)
    name = _NAME.search(code)
    if name is None:
        return
    rest = code[_end_of(code, name.end(), "(", ")") :]
    if re.match(r"[^;{}]*\{", rest):
        yield name[1]


def _without_attributes(code: str) -> str:
    """Remove `__launch_bounds__(256)` and the like before the body."""
    while found := _ATTRIBUTE.search(code.partition("{")[0]):
        end = _end_of(code, found.end(), "(", ")")
        code = f"{code[: found.start()]} {code[end:]}"
    return code


def _end_of(code: str, start: int, opening: str, closing: str) -> int:
    """Return the place after the bracket that closes one opened before `start`."""
    depth = 1
    for place in range(start, len(code)):
        depth += (code[place] == opening) - (code[place] == closing)
        if depth == 0:
            return place + 1
    return len(code)
