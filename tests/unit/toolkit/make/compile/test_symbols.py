from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.symbols import SymbolError, check_symbols, find_shared

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
    assert check_symbols(objects) == 4  # a function and its static, per target


@needs_gxx
def test_a_launcher_that_does_not_know_its_target_is_found(tmp_path: Path) -> None:
    objects = [_compile(tmp_path, "a", "80"), _compile(tmp_path, "b", "80")]
    with pytest.raises(SymbolError, match=r"2 symbols of kernels are defined twice[\s\S]*hint:"):
        check_symbols(objects)
