from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.symbols import (
    SymbolError,
    check_symbols,
    find_shared,
    require_distinct,
)

if TYPE_CHECKING:
    from pathlib import Path

LAUNCH_75 = "_ZN10flash_dist10launch_fwdINS_9FwdConfigINS_6TargetILi75ELc0EEEEEEiv"
LAUNCH_80 = LAUNCH_75.replace("75", "80")
HELPER = "_ZN10flash_dist8ceil_divEii"

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@pytest.mark.parametrize(
    ("definitions", "shared"),
    [
        ([("a.o", LAUNCH_75, "W"), ("b.o", LAUNCH_80, "W")], set()),
        ([("a.o", LAUNCH_75, "W"), ("b.o", LAUNCH_75, "W")], {LAUNCH_75}),
        ([("a.o", LAUNCH_75, "u"), ("b.o", LAUNCH_75, "u")], {LAUNCH_75}),
        ([("a.o", LAUNCH_75, "t"), ("b.o", LAUNCH_75, "t")], set()),
        ([("a.o", HELPER, "W"), ("b.o", HELPER, "W")], set()),
        ([("a.o", "_ZSt3minIiE", "W"), ("b.o", "_ZSt3minIiE", "W")], set()),
    ],
    ids=["two targets", "weak twice", "unique twice", "local", "no kernel", "not ours"],
)
def test_only_mergeable_symbols_of_kernels_count(
    definitions: list[tuple[str, str, str]], shared: set[str]
) -> None:
    assert set(find_shared(definitions)) == shared


def _compile(folder: Path, name: str, argument: str) -> Path:
    source = folder / f"{name}.cpp"
    source.write_text(
        "namespace flash_dist {\n"
        "template <int NUMBER> struct Target {};\n"
        "template <class T> struct FwdConfig {};\n"
        "template <class Config> int launch() { static int calls = 0; return ++calls; }\n"
        f"int {name}() {{ return launch<FwdConfig<Target<{argument}>>>(); }}\n"
        "}\n"
    )
    command = ["g++", "-c", str(source), "-o", str(source.with_suffix(".o"))]
    subprocess.run(command, check=True)
    return source.with_suffix(".o")


@needs_gxx
def test_objects_of_two_targets_share_nothing(tmp_path: Path) -> None:
    objects = [_compile(tmp_path, "a", "75"), _compile(tmp_path, "b", "80")]
    assert check_symbols(objects) == 4  # per target: a function and its static variable


@needs_gxx
def test_a_launcher_that_does_not_know_its_target_is_found(tmp_path: Path) -> None:
    objects = [_compile(tmp_path, "a", "80"), _compile(tmp_path, "b", "80")]
    with pytest.raises(SymbolError, match=r"2 symbols of kernels are defined twice[\s\S]*hint:"):
        check_symbols(objects)


DISTINCT = """
#define CONCAT(a, b) a##b
#define NAME(a, b) CONCAT(a, b)
struct FILE_t;
namespace FILE { int run() { return 0; } }
namespace { int anonymous() { return 0; } }
static int internal() { return anonymous(); }
inline int header() { return internal(); }
template <class T> T many(T x) { return x; }
int overloaded(FILE_t*) { return header() + many(1); }
int NAME(FILE_, run)() { return 0; }
#if 0
int left_out() { return 0; }
#endif
"""


def _sources(folder: Path, texts: dict[str, str]) -> dict[Path, str]:
    """Compile texts, and return the objects with the names of their sources."""
    found = {}
    for name, text in texts.items():
        source = folder / f"{name}.cpp"
        source.write_text(text)
        path = source.with_suffix(".o")
        command = ["g++", "-x", "c++", "-fvisibility=hidden", "-w", "-c", str(source)]
        subprocess.run([*command, "-o", str(path)], check=True)
        found[path] = f"csrc/{name}.cu"
    return found


@needs_gxx
def test_names_that_differ_for_the_compiler_may_look_alike(tmp_path: Path) -> None:
    require_distinct(_sources(tmp_path, {one: DISTINCT.replace("FILE", one) for one in "ab"}))


@needs_gxx
def test_two_files_with_one_function_are_named_in_a_sentence(tmp_path: Path) -> None:
    stub = 'extern "C" void _Z21__device_stub__Z4scalPf(float*) {}\n'  # as nvcc writes it
    same = f"namespace my {{ void scale(float*, int) {{}} int size; }}\n{stub}"
    sources = _sources(tmp_path, {"a": same, "b": "int other;", "c": same})
    with pytest.raises(SymbolError) as caught:
        require_distinct(sources)
    assert str(caught.value) == (
        "2 files define `my::scale(float*, int)`, `my::size`: `csrc/a.cu` and `csrc/c.cu`\n\n"
        "hint: rename it in one, make it `static`, or `inline` if it is in a header"
    )
