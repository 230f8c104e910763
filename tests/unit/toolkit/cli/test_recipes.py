"""The recipes of docs/recipes.md, run unchanged."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from flash_dist.toolkit.cli import make_parser
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    import argparse

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[4]
TEXT = (ROOT / "docs" / "recipes.md").read_text()
ALPHA = cubin(Kernel("alpha"))
COMPLETE = (
    entry(SASS, 80, ALPHA),
    entry(SASS, 90, ALPHA, suffix="a"),
    entry(PTX, 90, ptx("alpha", target="sm_90a", version="8.0"), suffix="a", isa=(8, 0)),
)


def block(language: str, words: str) -> str:
    """Return the only block of a language that contains these words."""
    found = [
        text for text in re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL) if words in text
    ]
    assert len(found) == 1, words
    return str(found[0])


@pytest.fixture
def project(tmp_path: Path, program: Path) -> Path:
    """Return a project with the program in `tools`, and its requirements."""
    (tmp_path / "tools").mkdir()
    shutil.copy(program, tmp_path / "tools")
    (tmp_path / "pyproject.toml").write_text(block("toml", "[tool.flash_dist.audit]"))
    (tmp_path / "wheelhouse").mkdir()
    return tmp_path


def put_wheel(project: Path, *images: bytes) -> Path:
    path = project / "wheelhouse" / "pkg-1.0-py3-none-linux_x86_64.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/kernels.so", library(container(*images)))
    return path


def run(project: Path, command: str) -> subprocess.CompletedProcess[str]:
    program, *argv = shlex.split(command)
    assert program == "python"
    return subprocess.run(
        [sys.executable, "-I", *argv], cwd=project, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_cibuildwheel_audits_each_wheel(project: Path) -> None:
    table = tomllib.loads(block("toml", "[tool.cibuildwheel]"))
    command = table["tool"]["cibuildwheel"]["audit-command"]
    wheel = put_wheel(project, *COMPLETE)
    done = run(project, command.format(wheel=wheel))
    assert done.returncode == 0, done.stdout + done.stderr
    put_wheel(project, *COMPLETE[:1])
    done = run(project, command.format(wheel=wheel))
    assert done.returncode == 1
    assert "no code for sm_90a, which is required" in done.stdout


def test_github_gets_annotations(project: Path) -> None:
    put_wheel(project, *COMPLETE[1:])
    command = block("yaml", "--format github").removeprefix("- run: ").strip()
    done = run(project, command)
    assert done.returncode == 1
    assert done.stdout.startswith("::error file=wheelhouse::")
    assert "no code for sm_80, which is required" in done.stdout


def test_pre_commit_hands_over_the_files_that_match(project: Path) -> None:
    hook = block("yaml", "repo: local")
    entry_, pattern = (
        str(re.findall(rf"^ *{key}: (.*)$", hook, re.MULTILINE)[0]) for key in ("entry", "files")
    )
    wheel = put_wheel(project, *COMPLETE)
    assert re.search(pattern, wheel.name)
    assert not re.search(pattern, "setup.py")
    assert run(project, f"{entry_} {shlex.quote(str(wheel))}").returncode == 0


@pytest.mark.slow
def test_what_if_and_comparison_answer(project: Path) -> None:
    wheel = put_wheel(project, *COMPLETE)
    done = run(project, block("sh", "doctor --wheel").strip())
    assert done.returncode == 1
    assert "compute capability 7.5: no code that it can load" in done.stdout
    shutil.copy(wheel, project / "old.whl")
    put_wheel(project, *COMPLETE[:2])
    shutil.copy(wheel, project / "new.whl")
    done = run(project, block("sh", "--diff").strip())
    assert "removed: compute_90a in pkg/kernels.so" in done.stdout


def accept(command: list[str]) -> argparse.Namespace:
    """Parse a command with our own parser, which raises UsageError for unknown parts."""
    assert command[:3] == ["python", "-m", "flash_dist"]
    return make_parser().parse_args(command[3:])


def test_the_gate_keeps_its_page_when_it_fails() -> None:
    doctor, upload = yaml.safe_load(block("yaml", "upload-artifact"))
    args = accept(shlex.split(doctor["run"]))
    assert args.strict
    assert upload["if"] == "always()"
    assert upload["with"]["path"] == str(args.report)


def test_the_container_is_unhealthy_for_every_status_but_0() -> None:
    text = block("dockerfile", "HEALTHCHECK").replace("\\\n", " ")
    instructions = [line.split(maxsplit=1) for line in text.splitlines()]
    assert {name for name, _ in instructions} == {"FROM", "COPY", "RUN", "ENV", "HEALTHCHECK"}
    check = next(rest for name, rest in instructions if name == "HEALTHCHECK")
    options, _, command = check.partition("CMD ")
    assert all(re.fullmatch(r"--[a-z-]+=\d+[ms]?", option) for option in options.split())
    command, _, otherwise = command.partition(" || ")
    assert otherwise == "exit 1"
    assert accept(shlex.split(command)).no_selftest


def test_the_init_container_has_the_gpus_of_the_program() -> None:
    pod = yaml.safe_load(block("yaml", "kind: Pod"))
    (doctor,), (program,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    assert doctor["resources"] == program["resources"]
    assert doctor["image"] == program["image"]
    args = accept(doctor["command"])
    assert not args.no_selftest
    assert args.gpu is None


def test_packages_carried_to_a_machine_without_network_suffice_there() -> None:
    download = shlex.split(block("sh", "pip download"))
    install, doctor = block("sh", "--no-index").splitlines()
    folder = download[download.index("--dest") + 1]
    assert shlex.split(install)[-3:] == ["--find-links", folder, "flash_dist"]
    assert "--no-index" in install
    accept(shlex.split(doctor))
