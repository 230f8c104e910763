from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.assemble import (
    AssembleError,
    Assembler,
    Ptx,
    assemble,
    is_taken,
    read_ptx,
    targets_of,
)
from flash_dist.toolkit.make.compile.ptxas import parse_ptxas
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.axes import Place
from tests.unit.made import fatbin_builder as build

if TYPE_CHECKING:
    from pathlib import Path

SETS = [ArchSet.parse("7.5;8.0;8.6;8.9+PTX", name="a"), ArchSet.parse("9.0a;12.0", name="b")]
PTX_120 = Ptx(Arch.parse("compute_120"), b".version 9.0", ("k",))


def fake_ptxas(folder: Path) -> str:
    path = folder / "ptxas"
    path.write_text(
        "#!/bin/sh\n"
        f"echo run >> {folder}/runs\n"
        "for arg; do case $arg in -arch=*) arch=${arg#-arch=};; esac; done\n"
        "grep -q broken && { echo 'ptxas fatal'; exit 1; }\n"
        "echo \"ptxas info    : Compiling entry function 'k' for '$arch'\"\n"
        "echo 'ptxas info    : Function properties for k'\n"
        "echo '    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads'\n"
        "echo 'ptxas info    : Used 64 registers'\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("ptx", "targets"),
    [
        ("compute_75", "sm_75 sm_80 sm_86 sm_89 sm_90a sm_120"),
        ("compute_89", "sm_89 sm_90a sm_120"),
        ("compute_87", "sm_87 sm_89 sm_90a sm_120"),
        ("compute_120", "sm_120"),
        ("compute_90a", "sm_90a"),
    ],
)
def test_ptx_is_assembled_for_its_own_number_and_every_newer_target(ptx: str, targets: str) -> None:
    assert " ".join(map(str, targets_of(Arch.parse(ptx), SETS))) == targets


@pytest.mark.parametrize(
    ("built", "targets"),
    [
        ("8.0+PTX", "sm_80 sm_90a sm_120"),
        ("7.5;8.0+PTX;9.0a;12.0", "sm_80"),
        ("8.0+PTX;9.0", "sm_80 sm_120"),
        ("8.6;8.0+PTX", "sm_80 sm_90a sm_120"),
    ],
)
def test_ptx_is_not_assembled_for_gpus_that_have_sass(built: str, targets: str) -> None:
    archs = ArchSet.parse(built).archs
    assert " ".join(map(str, targets_of(Arch.parse("compute_80"), SETS, archs))) == targets


@pytest.mark.parametrize(
    ("target", "taken"), [("sm_75", "a64"), ("sm_80", "a163"), ("sm_86", "a99"), ("sm_90a", "a163")]
)
def test_a_gpu_takes_the_largest_plan_that_it_has_room_for(target: str, taken: str) -> None:
    places = {f"a{kib}": ("fwd", Place(("fp16",), (64, 64), kib)) for kib in (64, 99, 163)}
    places["other"] = ("fwd", Place(("bf16",), (64, 64), 227))
    found = [name for name in places if is_taken(name, Arch.parse(target), places)]
    assert [name for name in found if name != "other"] == [taken]
    assert ("other" in found) == (target == "sm_90a")


def test_registers_are_listed_per_target(tmp_path: Path) -> None:
    assembler = Assembler(fake_ptxas(tmp_path), "13.0.88", tmp_path / "cache")
    ptx = Ptx(Arch.parse("compute_89"), b".version 9.0", ("k",))
    work = [(ptx, target) for target in targets_of(ptx.arch, SETS)]
    texts = assemble(work, assembler, jobs=2)
    found = [kernel for text in texts for kernel in parse_ptxas(text)]
    assert [(one.target, one.registers) for one in found] == [
        ("sm_89", 64),
        ("sm_90a", 64),
        ("sm_120", 64),
    ]


def test_the_same_text_is_assembled_once(tmp_path: Path) -> None:
    assembler = Assembler(fake_ptxas(tmp_path), "13.0.88", tmp_path / "cache")
    ptx = Ptx(Arch.parse("compute_120"), b".version 9.0", ("k",))
    assert assembler.run(ptx, Arch.parse("sm_120")) == assembler.run(ptx, Arch.parse("sm_120"))
    assert (tmp_path / "runs").read_text().count("run") == 1


def test_only_new_text_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assembler = Assembler(fake_ptxas(tmp_path), "13.0.88", tmp_path / "cache")
    work = [(PTX_120, Arch.parse(target)) for target in ("sm_120", "sm_121")]
    assert len(assemble(work[:1], assembler, jobs=1)) == 1
    assert capsys.readouterr().out == "[1/1] Assembling PTX offline\n"
    for text, target in zip(assemble(work, assembler, jobs=2), ("sm_120", "sm_121"), strict=True):
        assert f"for '{target}'" in text
    assert capsys.readouterr().out == "[1/1] Assembling PTX offline\n"
    assemble(work, assembler, jobs=1)
    assert capsys.readouterr().out == ""


def test_ptx_that_does_not_assemble_is_an_error(tmp_path: Path) -> None:
    assembler = Assembler(fake_ptxas(tmp_path), "13.0.88", tmp_path / "cache")
    with pytest.raises(AssembleError, match="does not assemble for sm_120: ptxas fatal"):
        assembler.run(Ptx(Arch.parse("compute_120"), b"broken", ("k",)), Arch.parse("sm_120"))


def test_ptx_is_taken_out_of_an_object_file(tmp_path: Path) -> None:
    text = build.ptx("k", target="sm_80")
    path = tmp_path / "k.o"
    entry = build.entry(build.PTX, 80, text, codec="zstd")
    path.write_bytes(build.library(build.container(entry)))
    assert read_ptx([path]) == [Ptx(Arch.parse("compute_80"), text.rstrip(b"\0"), ("k",))]
