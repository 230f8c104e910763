"""What Python imports in place of an installed package, told without importing it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from flash_dist.checks.install import check_torch
from flash_dist.machine.shadows import find_shadow
from flash_dist.machine.torch_install import Torch, read_torch
from tests.unit.made.builds import HOPPER, make_environment


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a torch and a numpy where Python looks after the folder that it is started in."""
    site, here = tmp_path / "site", tmp_path / "here"
    here.mkdir()
    for name in ("torch", "numpy"):
        info = site / f"{name}-2.13.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.13.0\n")
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
        (site / name / "version.py").write_text("cuda = '13.0'\n")
    monkeypatch.setattr("sys.path", [str(here), str(site)])
    monkeypatch.setattr("sys.path_importer_cache", {})
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(here)
    return site


def plant(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("raise SystemExit('imported')\n")
    return path


@pytest.mark.parametrize("name", ["torch.py", "torch/__init__.py", "numpy.py"])
def test_what_is_imported_in_place_of_torch_is_named_with_the_step(site: Path, name: str) -> None:
    file = plant(Path.cwd() / name)
    torch = read_torch()
    package = name[:5]
    assert torch.status == "shadowed"
    assert torch.reason == (
        f"`import {package}` takes {file}, which comes before {package} 2.13.0 in {site}"
    )
    place = Path.cwd()
    assert torch.fix == f"leave {place}, where Python looks first: `cd ..` and run it again"
    assert (torch.version, torch.cuda) == ("2.13.0", "13.0")


def test_a_shadow_is_a_failure_of_its_own(site: Path) -> None:
    plant(Path.cwd() / "torch.py")
    environment = make_environment(HOPPER)
    result = check_torch(replace(environment, torch=read_torch()))
    assert (result.status, result.id) == ("fail", "torch-shadowed")
    assert "pip install" not in result.fix
    assert str(site) in result.summary


def test_a_torch_of_which_metadata_alone_is_left_is_installed_by_force(site: Path) -> None:
    (site / "torch" / "version.py").unlink()
    torch = read_torch()
    gone = site / "torch" / "version.py"
    said = f"torch is installed but cannot be read: `{gone}`: No such file or directory"
    assert (torch.status, torch.reason) == ("broken", said)
    assert torch.advise("2.10") == "`pip install --force-reinstall torch`"


@pytest.mark.parametrize(
    ("others", "command"),
    [("", "`unset PYTHONPATH`"), ("/a:/b", "`export PYTHONPATH=/a:/b`")],
    ids=["alone", "among others"],
)
def test_what_pythonpath_brings_is_taken_out_of_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str, command: str
) -> None:
    place = tmp_path / "named"
    plant(place / "torch.py")
    monkeypatch.setattr("sys.path", ["", str(place), str(site)])
    monkeypatch.setenv("PYTHONPATH", f"{place}:{others}")
    shadow = find_shadow("torch")
    assert shadow is not None
    assert shadow.fix == f"{command}: it names {place}, where Python looks first"


def test_what_no_folder_and_no_variable_brings_is_to_be_renamed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plant(tmp_path / "pth" / "torch.py")
    monkeypatch.setattr("sys.path", ["", str(file.parent), str(site)])
    shadow = find_shadow("torch")
    assert shadow is not None
    assert shadow.fix == f"rename {file}, or take it away"


def test_the_installed_one_an_editable_one_and_an_empty_folder_are_no_shadows(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.cwd() / "torch").mkdir()  # without a module in it: Python goes on
    assert find_shadow("torch") is None
    assert read_torch() == Torch("ok", "2.13.0", "13.0")
    link = tmp_path / "link"
    link.symlink_to(site)
    monkeypatch.setattr("sys.path", [str(link), str(site)])
    assert find_shadow("torch") is None
    (site / "torch" / "__init__.py").unlink()
    (site / "torch" / "version.py").unlink()
    (site / "torch").rmdir()
    plant(tmp_path / "checkout" / "torch" / "__init__.py")
    monkeypatch.setattr("sys.path", [str(tmp_path / "checkout"), str(site)])
    assert find_shadow("torch") is None
    assert find_shadow("nothing_of_the_kind") is None
