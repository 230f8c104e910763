from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from flash_dist.toolkit.make.compile.native import (
    TOOLKIT_LINK,
    NativeBuildError,
    NativeOptions,
    explain_link,
    forget_moved,
    link_toolkit,
    ninja_version,
    progress_line,
    require_no_spills,
    shares_jobs,
)
from flash_dist.toolkit.make.compile.symbols import SymbolError
from flash_dist.toolkit.make.declaration import Plain, Project
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.targets.archs import Arch, ArchSet

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.toolkit.make.toolchain.nvcc import Toolchain
    from flash_dist.toolkit.make.toolchain.torch_headers import TorchHeaders

CACHE = "CMAKE_HOME_DIRECTORY:INTERNAL={sources}\n"


@pytest.mark.parametrize(
    ("toolkit", "tree", "kept"),
    [("cuda", "csrc", True), ("cuda-2", "csrc", False), ("cuda", "other", False)],
    ids=["the same", "another toolkit", "another tree"],
)
def test_objects_are_kept_for_the_same_toolkit_and_the_same_tree(
    toolkit: str, tree: str, *, kept: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "native"
    link_toolkit(folder, tmp_path / "cuda")
    (folder / "CMakeCache.txt").write_text(CACHE.format(sources=tmp_path / "csrc"))
    forget_moved(folder, tmp_path / toolkit, tmp_path / tree)
    assert folder.is_dir() is kept
    forget_moved(folder, tmp_path / toolkit, tmp_path / tree)  # a missing folder must not fail


def test_a_toolkit_has_the_same_path_from_every_build_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, toolkit in (
        ("a/native", "a/cuda"),
        ("deep/b/native", "cuda"),
        ("a/native", "cuda"),
    ):
        link = link_toolkit(tmp_path / folder, Path(toolkit))
        assert link == tmp_path / folder / TOOLKIT_LINK
        assert link.readlink() == tmp_path / toolkit


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("1.13.2.git.kitware", "[%f/%t, %w, %W left] "),
        ("1.12.0", "[%f/%t, %w, %W left] "),
        ("1.11.1", "[%f/%t, %e s] "),
        ("1.9.0", "[%f/%t, %e s] "),
    ],
)
def test_an_older_ninja_is_not_asked_for_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, line: str
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    ninja = tmp_path / "ninja"
    ninja.write_text(f"#!/bin/sh\necho {version}\n")
    ninja.chmod(0o755)
    assert progress_line(ninja_version()) == line


def test_without_ninja_cmake_is_left_to_say_so() -> None:
    assert progress_line(()) == "[%f/%t, %e s] "


def options_of(archs: str, *patterns: str, **project: Any) -> NativeOptions:  # noqa: ANN401
    """Return the options of a build, with spill exceptions."""
    rows = tuple({"symbol": one, "spill_bytes": 8, "reason": "measured"} for one in patterns)
    told = {"root": ROOT, "spills": rows, **project}
    own = Project(name="my_norms", version="0.1.0", torch_min="2.10", **told)
    archset = ArchSet.parse(archs, name="chosen")
    published = (archset, ArchSet.parse("8.0", name="other"))
    toolchain, headers = cast("Toolchain", None), cast("TorchHeaders", None)
    return NativeOptions(archset, published, toolchain, headers, 1, own)


SPILLING = """\
ptxas info    : Compiling entry function 'scale_kernel' for 'sm_90a'
ptxas info    : Function properties for scale_kernel
    16 bytes stack frame, 16 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_a_spill_fails_the_build_with_a_row_that_allows_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(NativeBuildError) as caught:
        require_no_spills([SPILLING], options_of("9.0a", "*scale*"))
    assert capsys.readouterr().out == "scale_kernel spills 16 bytes for sm_90a, allowed are 8\n"
    assert str(caught.value) == (
        "1 kernel spills registers and may not; all of it is listed above\n\n"
        "hint: reduce the tile, or allow it by a row of `spills` of [tool.kernels.gates]: "
        '`symbol = "*scale_kernel*", spill_bytes = 16, reason = "..."`'
    )


def test_a_file_of_permissions_is_named() -> None:
    path = ROOT / "csrc/spill_exceptions.toml"
    with pytest.raises(
        NativeBuildError, match=r"by a row of `csrc/spill_exceptions\.toml`: `symbol"
    ):
        require_no_spills([SPILLING], options_of("9.0a", spills=path))


def test_a_warning_that_no_row_allows_comes_without_that_hint() -> None:
    with pytest.raises(NativeBuildError) as caught:
        require_no_spills(["ptxas info : (C7510) Potential Performance Loss"], options_of("9.0a"))
    assert caught.value.hint is None


def test_a_row_for_no_kernel_is_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    text = SPILLING.replace("16 bytes spill stores, 12", "8 bytes spill stores, 8")
    require_no_spills([text], options_of("9.0a", "*scale*", "*sclae*"))
    assert capsys.readouterr().out == (
        "warning: `spills` of [tool.kernels.gates] names `*sclae*`, and no kernel has that name\n"
    )


def test_a_row_may_be_for_a_file_that_the_set_leaves_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    other = (Plain(Path("/p/other.cu"), (Arch(8, 0),)),)
    require_no_spills([], options_of("9.0a", "*other*", plain=other))
    assert capsys.readouterr().out == ""


def test_a_row_may_be_for_a_target_of_another_set(capsys: pytest.CaptureFixture[str]) -> None:
    table = ROOT / "csrc/kernels.toml"
    require_no_spills([], options_of("9.0a", "*_fwd_*_sm80", "*_fwd_*_sm75", table=table))
    said = capsys.readouterr().out
    assert (said.count("warning"), "`*_fwd_*_sm75`" in said) == (1, True)


@pytest.mark.parametrize(
    ("cuda", "ninja", "plain", "shares"),
    [
        ("13.0", (1, 13), True, True),
        ("13.5", (1, 20), True, True),
        ("12.9", (1, 13), True, False),
        ("13.0", (1, 12), True, False),
        ("13.0", (), True, False),
        ("13.0", (1, 13), False, False),
    ],
    ids=["both", "newer", "older nvcc", "older ninja", "no ninja", "a table alone"],
)
def test_nvcc_shares_the_jobs_of_ninja_where_both_can(
    cuda: str, ninja: tuple[int, ...], *, plain: bool, shares: bool
) -> None:
    files = (Plain(Path("/p/a.cu")),) if plain else ()
    toolchain = cast("Toolchain", SimpleNamespace(cuda=cuda))
    options = replace(options_of("8.0;9.0a", plain=files), toolchain=toolchain)
    assert shares_jobs(options, ninja) is shares


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
@pytest.mark.parametrize("absolute", [False, True], ids=["old CMake", "new CMake"])
def test_a_failed_link_names_the_files_that_define_the_same(
    tmp_path: Path, *, absolute: bool
) -> None:
    files = [tmp_path / "csrc" / f"{name}.cu" for name in "ab"]
    options = options_of("8.0", plain=tuple(map(Plain, files)), root=tmp_path)
    output = f"CMakeFiles/{options.groups[0].name}.dir"
    (tmp_path / output).mkdir(parents=True)
    output = str(tmp_path / output) if absolute else output
    files[0].parent.mkdir()
    rows = [{"file": str(one), "output": f"{output}/{one.name}.o"} for one in files]
    (tmp_path / "compile_commands.json").write_text(json.dumps(rows))
    for one in files:
        one.write_text("void run() {}")
        explain_link(options, tmp_path)  # silent: the compiler has already reported the failure
        made = str(tmp_path / output / f"{one.name}.o")
        subprocess.run(["g++", "-x", "c++", "-c", str(one), "-o", made], check=True)
    with pytest.raises(SymbolError, match=r"2 files define `run\(\)`: `csrc/a.cu` and `csrc/b.cu`"):
        explain_link(options, tmp_path)


BUILD = """\
rule wait
  command = echo $$$$ > $out && exec sleep 60
build compiler.pid: wait
"""
KILLED = """\
import sys
from pathlib import Path
from flash_dist.toolkit.make.compile.native import _run, hold
folder = Path(sys.argv[1])
hold(folder.with_name(f"{folder.name}.lock"))
_run(["ninja", "-C", str(folder)])
"""


@pytest.mark.skipif(shutil.which("ninja") is None, reason="ninja is not installed")
def test_a_killed_build_takes_its_compilers_along_and_lets_others_in(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "native-1"
    folder.mkdir()
    (folder / "build.ninja").write_text(BUILD)
    pid = folder / "compiler.pid"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], cwd=ROOT) as build:
        wait_for(lambda: pid.is_file() and pid.read_text())
        compiler = Path("/proc", pid.read_text().strip())
        assert compiler.is_dir()
        other = subprocess.Popen(
            [sys.executable, "-c", KILLED.replace("_run([", "print(["), str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert other.stdout is not None
        told = other.stdout.readline()
        assert told == f"another build works in `{folder}`; waiting for its end\n"
        assert other.poll() is None
        os.kill(build.pid, signal.SIGKILL)
    assert "ninja" in other.communicate(timeout=30)[0]
    wait_for(lambda: not compiler.is_dir())


def wait_for(happened: Callable[[], object], seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until
        time.sleep(0.01)
