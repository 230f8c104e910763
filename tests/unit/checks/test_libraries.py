"""Libraries of others that the driver refuses: the step that helps is that of the cause."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.checks.libraries import examine_libraries
from flash_dist.gpucode.libraries import open_libraries
from tests.unit.made.fatbin_builder import PTX, container, entry, library, ptx
from tests.unit.made.scenarios import AMPERE, change_host, make_machine

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.checks.environment import Environment

MACHINE = make_machine("8.0", AMPERE)


@pytest.mark.parametrize(
    ("machine", "words", "fix"),
    [
        (
            make_machine("8.0", AMPERE, driver="535.183.01"),
            "PTX ISA 9.0 needs driver 580 or newer",
            "install NVIDIA driver 580 or newer",
        ),
        (
            replace(MACHINE, variables={"CUDA_DISABLE_PTX_JIT": "1"}),
            "CUDA_DISABLE_PTX_JIT is set",
            "`unset CUDA_DISABLE_PTX_JIT`",
        ),
        (
            change_host(MACHINE, jit_compiler=""),
            "libnvidia-ptxjitcompiler.so.1 is missing",
            "install the whole driver, its JIT compiler included",
        ),
    ],
    ids=["driver", "variable", "compiler"],
)
def test_a_library_of_ptx_alone_says_what_stands_in_its_way(
    tmp_path: Path, machine: Environment, words: str, fix: str
) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(PTX, 80, ptx("add")))))
    machine = replace(machine, installed=replace(machine.installed, build=None))
    *_, result = examine_libraries(machine, open_libraries(path))
    assert (result.status, result.id, result.fix) == ("fail", "library-refused", fix)
    assert words in result.summary


def test_a_folder_without_libraries_is_called_so(tmp_path: Path) -> None:
    *_, result = examine_libraries(MACHINE, open_libraries(tmp_path))
    assert (result.status, result.summary) == ("warn", "no library inside")
