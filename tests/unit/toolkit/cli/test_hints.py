"""Hints work where they are read: nox and `dist/` exist in a clone, and nowhere else."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit import errors
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.indexes.install_commands import find_commands
from flash_dist.toolkit.indexes.selection import candidates_of
from flash_dist.toolkit.targets.advice import unsupported_fix
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.index_address import INDEX, explain_placeholder
from flash_dist.toolkit.targets.verdict import Build
from tests.unit.made.sources import find_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE = Path(errors.__file__).parents[1]
# Functions that are only called in a clone.
CLONE_ONLY = {"_build", "build_fix"}


def find_nox(tree: ast.AST, *, excused: bool = False) -> Iterator[ast.Constant]:
    """Yield the strings that name nox, except those printed only in a clone."""
    for node in ast.iter_child_nodes(tree):
        is_hint = isinstance(node, ast.Call) and "hint_to_build" in ast.unparse(node.func)
        is_meant = isinstance(node, ast.FunctionDef) and node.name in CLONE_ONLY
        if isinstance(node, ast.Constant) and "nox -s" in str(node.value) and not excused:
            yield node
        yield from find_nox(node, excused=excused or is_hint or is_meant)


def test_hints_that_name_nox_have_an_alternative_without_a_clone() -> None:
    paths = find_modules()
    found = [
        f"{path.name}:{node.lineno}"
        for path in paths
        if path.parent.name != "findings"
        for node in find_nox(ast.parse(path.read_text("utf-8")))
    ]
    assert (len(paths) > 100, found) == (True, [])


def test_findings_name_nox_for_a_clone_only() -> None:
    for entry in FINDINGS.values():
        for sentence in re.split(r"(?<=[.;]) ", entry.remedy):
            assert "nox" not in sentence or "a clone" in sentence, sentence


@pytest.fixture
def _no_clone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "IN_CHECKOUT", False)


@pytest.mark.usefixtures("_no_clone")
def test_a_set_is_installed_from_an_index_where_there_is_no_clone() -> None:
    build = Build("flash_dist 0.1.0+cu130.hopper", (), published_sets())
    assert unsupported_fix([Device(8, 6)], build) == (
        f'`pip install "flash_dist==0.1.0+cu130.sm75to89" --extra-index-url {INDEX}'
        "turing-ampere-ada/` installs the arch set `turing-ampere-ada` "
        f"({explain_placeholder()})"
    )
    assert unsupported_fix([Device(8, 6)], Build("flash_dist 0.1.0+cu130.hopper", ())) == (
        "`TORCH_CUDA_ARCH_LIST='8.6' pip install flash_dist-0.1.0.tar.gz` builds and installs a "
        "wheel for exactly these from the sources of the release"
    )
    unknown = unsupported_fix([Device(8, 6)], Build("flash_dist", (), published_sets()))
    assert '"flash_dist==VERSION+cu130.sm75to89"' in unknown


@pytest.mark.usefixtures("_no_clone")
def test_commands_of_a_published_set_where_there_is_no_clone() -> None:
    def commands(name: str, machine: str) -> list[tuple[str, str]]:
        sets = candidates_of(published_sets(), machine)
        (found,) = (one for one in sets if one.name == name)
        return [(one.tool, one.line) for one in find_commands(found, None, release="0.1.0")]

    assert commands("all", "x86_64") == [
        ("pip", f'pip install "flash_dist==0.1.0+cu130.all" --extra-index-url {INDEX}all/'),
        ("uv", f'uv pip install "flash_dist==0.1.0+cu130.all" --index {INDEX}all/'),
        ("build", "FLASH_DIST_ARCH_SET=all pip install flash_dist-0.1.0.tar.gz"),
    ]
    # pip compiles from source, which works only on x86_64, for x86_64 and with CUDA 13
    assert [tool for tool, _ in commands("cuda12", "x86_64")] == ["pip", "uv"]
    assert commands("arm", "aarch64") == [
        ("pip", f'pip install "flash_dist==0.1.0+cu130.arm" --extra-index-url {INDEX}arm/'),
        ("uv", f'uv pip install "flash_dist==0.1.0+cu130.arm" --index {INDEX}arm/'),
    ]


@pytest.mark.usefixtures("_no_clone")
def test_a_list_for_arm_is_cross_compiled_where_there_is_no_clone() -> None:
    arm = tuple(one for one in published_sets() if one.machine == "aarch64")
    assert unsupported_fix([Device(7, 5)], Build("flash_dist 0.1.0+cu130.arm", (), arm)) == (
        "in a clone on x86_64 `TORCH_CUDA_ARCH_LIST='7.5' nox -s build_arm` builds a wheel for "
        "exactly these"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        "select --gpu 8.6,9.0 --driver 580",
        "select --gpu 10.3,12.1 --driver 580",
        "doctor --gpu 9.0 --driver 580",
        "doctor",
        "inspect nothing.whl",
        "verify nothing.whl",
        "verify --manifest none.json none.json",
        "audit nothing.whl",
    ],
)
def test_no_command_names_nox_where_the_package_is_installed(
    tmp_path: Path, arguments: str
) -> None:
    """The test copies the package without the rest of the clone, as pip would install it."""
    copy = tmp_path / "site" / "flash_dist"
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(PACKAGE, copy, ignore=ignored, symlinks=True)
    (tmp_path / "none.json").write_text("{}")
    command = [sys.executable, "-m", "flash_dist", *arguments.split()]
    done = subprocess.run(
        command,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PYTHONPATH": str(copy.parent), "PATH": ""},
    )
    said = done.stdout + done.stderr
    assert said
    assert "Traceback" not in said
    assert "nox -s" not in said
