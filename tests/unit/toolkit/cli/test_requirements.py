"""A missing or hidden requirement of an install gives one sentence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.cli import SUBCOMMANDS
from flash_dist.toolkit.cli.requirements import explain_import
from flash_dist.toolkit.make.project import ROOT

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

REQUIRED = ["packaging", "rich"]
ZSTD = [] if sys.version_info >= (3, 14) else ["backports.zstd"]
BLOCK = """
import sys
from importlib.machinery import PathFinder
gone = sys.argv.pop(1).split(",")
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name in gone else find(name, *rest)
from flash_dist.toolkit.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run_without(names: list[str], *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a subcommand with packages hidden."""
    command = [sys.executable, "-c", BLOCK, ",".join(names), *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("command", [*SUBCOMMANDS, "--help", "--version"])
def test_every_subcommand_names_all_that_is_not_installed(command: str) -> None:
    done = run_without([*REQUIRED, *ZSTD], command, *(["x"] if command == "explain" else []))
    names = [*REQUIRED, *ZSTD]
    said = f"error: flash_dist needs {', '.join(names)}, which are not installed here\n\nhint: "
    assert done.stderr == f"{said}`python -m pip install {' '.join(names)}`\n"
    assert (done.returncode, done.stdout) == (2, "")


@pytest.mark.parametrize(
    ("name", "command"),
    [*(("packaging", command) for command in SUBCOMMANDS), ("rich", "doctor")],
)
def test_one_that_is_missing_is_named_or_not_needed(name: str, command: str) -> None:
    done = run_without([name], command, "--help")
    assert "Traceback" not in done.stderr
    if done.returncode:
        assert done.returncode == 2
        assert done.stderr.startswith(f"error: flash_dist needs {name}, which is not installed")
        assert done.stderr.endswith(f"`python -m pip install {name}`\n")


def test_a_folder_of_that_name_is_told_from_one_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "packaging").mkdir()
    (tmp_path / "packaging" / "__init__.py").touch()
    code = "import sys; from flash_dist.toolkit.cli import main; sys.exit(main(['doctor']))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    said, empty, hint, end = done.stderr.split("\n")
    assert said.startswith(f"error: `import packaging` loads {tmp_path}/packaging/__init__.py,")
    assert hint.startswith(f"hint: leave {tmp_path}")
    assert (empty, end) == ("", "")


def test_a_module_of_our_own_that_is_gone_is_a_damaged_install(
    monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setitem(sys.modules, "flash_dist.toolkit.cli.select", None)
    said = cli("select", status=2).err
    assert re.match(
        r"error: flash_dist in \S+ is incomplete: .*flash_dist\.toolkit\.cli\.select", said
    )
    assert "--force-reinstall" in said


@pytest.mark.parametrize("name", ["flash_dist/masks", "packaging/tags.py"])
def test_a_package_that_this_user_may_not_read_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, _: Path(path).name != Path(name).name)
    explained = explain_import(ImportError("cannot import", name=name.replace("/", ".")))
    assert explained is not None
    assert re.fullmatch(rf"this user cannot read `\S+/{name}`", explained.message)
    assert (explained.hint or "").startswith("as its owner: `chmod -R a+rX ")


def test_a_package_that_cannot_be_imported_is_to_be_installed_again() -> None:
    explained = explain_import(ImportError("cannot import name 'Tag'", name="packaging.tags"))
    assert explained is not None
    assert explained.hint == "`python -m pip install --force-reinstall packaging`"


def test_a_module_that_is_no_requirement_keeps_its_traceback() -> None:
    assert explain_import(ModuleNotFoundError("No module named 'x'", name="x")) is None
