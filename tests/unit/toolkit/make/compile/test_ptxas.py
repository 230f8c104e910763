from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.compile.gate import explain_clash, ptxas_lines
from flash_dist.toolkit.make.compile.gate import main as compile_gate
from flash_dist.toolkit.make.compile.ptxas import KernelResources, parse_ptxas

if TYPE_CHECKING:
    from pathlib import Path

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'flash_dist_a_sm80' for 'sm_80'
ptxas info    : Function properties for flash_dist_a_sm80
    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 552 bytes cmem[0]
ptxas info    : Compile time = 6.225 ms
ptxas info    : Compiling entry function 'flash_dist_b_sm80' for 'sm_80'
ptxas info    : Function properties for flash_dist_b_sm80
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
"""


def test_registers_stack_and_shared_memory_are_read_per_kernel() -> None:
    assert parse_ptxas(CLEAN) == [
        KernelResources("flash_dist_a_sm80", "sm_80", 168, 0, 16, 1024),
        KernelResources("flash_dist_b_sm80", "sm_80", 32, 0, 0, 0),
    ]


def test_a_frame_of_a_function_that_was_not_inlined_is_not_the_kernels() -> None:
    inner = (
        "ptxas info    : Function properties for helper\n"
        "    64 bytes stack frame, 40 bytes spill stores, 40 bytes spill loads\n"
    )
    first, rest = CLEAN.split("ptxas info    : Used 168", 1)
    assert parse_ptxas(f"{first}{inner}ptxas info    : Used 168{rest}") == parse_ptxas(CLEAN)


def test_runs_for_several_targets_may_print_at_once() -> None:
    other = CLEAN.replace("sm_80", "sm_90a").replace("0 bytes spill", "4 bytes spill")
    lines, others = CLEAN.splitlines(), other.splitlines()
    mixed = [lines[:4], others[:4], lines[4:9], others[4:7], lines[9:], others[7:]]
    found = parse_ptxas("\n".join(line for part in mixed for line in part))
    spills = {(one.symbol, one.target): one.spill_bytes for one in found}
    assert spills == {
        ("flash_dist_a_sm80", "sm_80"): 0,
        ("flash_dist_b_sm80", "sm_80"): 0,
        ("flash_dist_a_sm80", "sm_90a"): 4,
        ("flash_dist_b_sm80", "sm_90a"): 4,
    }


def test_lines_of_other_programs_are_told_apart() -> None:
    text = f"{CLEAN}a.cu(1): warning #177-D: unused variable\n"
    assert "".join(f"{line}\n" for line in ptxas_lines(text)) == CLEAN


def _nvcc(tmp_path: object, text: str) -> list[str]:
    script = f"import sys; sys.stderr.write({text!r}); open(sys.argv[2], 'w').write('object')"
    return ["python3", "-c", script, "-o", f"{tmp_path}/a.o"]


def test_the_launcher_keeps_what_ptxas_says(tmp_path: object) -> None:
    assert compile_gate(_nvcc(tmp_path, CLEAN)) == 0
    with open(f"{tmp_path}/a.o.ptxas", encoding="utf-8") as kept:  # noqa: PTH123
        assert kept.read() == CLEAN


def test_the_launcher_forgets_what_ptxas_said_of_a_file_that_has_no_kernel_left(
    tmp_path: Path,
) -> None:
    kept = tmp_path / "a.o.ptxas"
    compile_gate(_nvcc(tmp_path, CLEAN))
    assert kept.is_file()
    compile_gate(_nvcc(tmp_path, "a.cu(1): warning"))
    assert not kept.is_file()


def test_the_launcher_passes_a_failure_on() -> None:
    assert compile_gate(["python3", "-c", "raise SystemExit(3)"]) == 3


def test_no_old_object_is_left_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.o").touch()
    assert compile_gate([*_fail("a.cu(3): error")[:-1], f"{tmp_path}/a.o"]) == 2
    assert not (tmp_path / "a.o").exists()


KILLED = [
    "nvcc error   : 'cicc' died due to signal 9 (Kill signal)",
    "g++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.",
    "Killed",
    "sh: line 1:  4711 Killed                  nvcc a.cu",
    "cc1plus: out of memory allocating 65536 bytes after a total of 9 bytes",
    "LLVM ERROR: out of memory",
]


def _fail(text: str) -> list[str]:
    return ["python3", "-c", f"import sys; sys.stderr.write({text!r}); sys.exit(2)", "-o", "a.o"]


@pytest.mark.parametrize("text", KILLED)
def test_the_launcher_says_where_memory_ran_out(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compile_gate(_fail(text)) == 2
    said = capfd.readouterr().err
    assert said.endswith("\n\nhint: memory ran out: `MAX_JOBS=1` needs the least\n")


@pytest.mark.parametrize(
    "text",
    [
        "a.cu(3): error: expected a ;",
        'a.cu(3): error: class "State" has no member "Killed"',
        "nvcc error   : 'ptxas' died due to signal 11 (Invalid memory reference)",
        "a.cu(3): error: process.Killed is no member",
    ],
)
def test_the_launcher_says_nothing_of_memory_for_another_failure(
    text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compile_gate(_fail(text)) == 2
    assert "memory ran out" not in capfd.readouterr().err


def test_the_launcher_knows_a_compiler_that_was_killed_itself(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert compile_gate(["python3", "-c", "import os; os.kill(os.getpid(), 9)"]) == 1
    assert "memory ran out" in capfd.readouterr().err


NVCC_SAYS = 'a.cu(2): error: "NAME" has already been declared in the current scope'
GXX_SAYS = "a.cpp:2:21: error: '{}' redeclared as different kind of entity"
CLASHES = {
    "nvcc": NVCC_SAYS,
    "a function": GXX_SAYS.format("int NAME(int)"),
    "a template": GXX_SAYS.format("template<class T> T NAME(T)"),
    "a type": GXX_SAYS.format("struct NAME"),
    "the namespace": GXX_SAYS.format("namespace NAME { }"),
}


@pytest.mark.parametrize("text", CLASHES.values(), ids=CLASHES)
def test_a_name_that_is_the_namespace_too_comes_with_the_key_that_helps(
    text: str, tmp_path: Path
) -> None:
    product = tmp_path / "product.h"
    assert explain_clash(text.replace("NAME", "fused_ssim"), product) == []
    product.write_text("#pragma once\n\n#define KERNEL_NAMESPACE fused_ssim\n")
    assert "\n".join(explain_clash(text.replace("NAME", "fused_ssim"), product)) == (
        "\nhint: `fused_ssim` is the C++ namespace of the toolkit's functions, too: "
        '`namespace = "fused_ssim_kernels"` of [tool.kernels] renames it'
    )
    assert explain_clash(text.replace("NAME", "fused_ssim_map"), product) == []


def test_another_function_with_an_argument_of_the_namespace_is_no_clash(tmp_path: Path) -> None:
    product = tmp_path / "product.h"
    product.write_text("#define KERNEL_NAMESPACE fused_ssim\n")
    assert explain_clash(GXX_SAYS.format("int other(fused_ssim::K)"), product) == []
    assert explain_clash("a.cpp:2: error: 'fused_ssim' was not declared", product) == []
