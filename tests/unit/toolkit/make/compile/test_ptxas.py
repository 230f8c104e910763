from __future__ import annotations

from flash_dist.toolkit.make.compile.gate import main as compile_gate
from flash_dist.toolkit.make.compile.ptxas import (
    KernelResources,
    parse_ptxas,
    ptxas_lines,
)

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


def test_the_launcher_passes_a_failure_on() -> None:
    assert compile_gate(["python3", "-c", "raise SystemExit(3)"]) == 3
