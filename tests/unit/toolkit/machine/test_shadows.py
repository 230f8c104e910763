"""Files that Python imports instead of an installed package, found without importing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from flash_dist.toolkit.checks.install import check_torch
from flash_dist.toolkit.doctor.record import Record
from flash_dist.toolkit.machine.shadows import find_shadow
from flash_dist.toolkit.machine.torch_install import Torch, read_torch
from flash_dist.toolkit.redaction import Redaction
from tests.unit.made.builds import HOPPER, make_environment
from tests.unit.toolkit.cli.test_schemas import SCHEMAS


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a torch and a numpy in a folder that Python searches after the working folder."""
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
def test_a_file_that_hides_torch_is_named_with_the_step(site: Path, name: str) -> None:
    file = plant(Path.cwd() / name)
    torch = read_torch()
    package = name[:5]
    assert torch.status == "shadowed"
    assert torch.reason == (
        f"`import {package}` loads {file}, which comes before {package} 2.13.0 in {site}"
    )
    place = Path.cwd()
    assert torch.fix == f"leave {place}, which Python searches first: `cd ..` and run it again"
    assert (torch.version, torch.cuda) == ("2.13.0", "13.0")


def plant_torch(place: Path, version: str, cuda: str = "'13.0'") -> None:
    info = place / f"torch-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    (place / "torch").mkdir()
    (place / "torch" / "__init__.py").touch()
    (place / "torch" / "version.py").write_text(f"cuda = {cuda}\n")


@pytest.mark.parametrize(
    ("version", "cuda", "cause"),
    [("2.5.0", "'12.4'", "torch-too-old"), ("2.13.0", "None", "torch-cpu-build")],
)
def test_the_good_one_of_two_torches_is_not_replaced(  # noqa: PLR0913, PLR0917
    site: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    cuda: str,
    cause: str,
) -> None:
    first = tmp_path / "first"
    plant_torch(first, version, cuda)
    monkeypatch.setattr("sys.path", ["", str(first), str(site)])
    monkeypatch.setenv("PYTHONPATH", str(first))
    environment = replace(make_environment(HOPPER, "9.0"), torch=read_torch())
    result = check_torch(environment)
    assert (result.status, result.id) == ("fail", cause)
    assert result.details == (
        f"Python searches {first} first",
        f"then: torch 2.13.0 (CUDA 13.0) in {site}",
    )
    assert result.fix == (
        f"`unset PYTHONPATH`: it names {first}, which Python searches first; "
        f"torch 2.13.0 (CUDA 13.0) in {site} fits"
    )
    monkeypatch.delenv("PYTHONPATH")
    step = check_torch(replace(environment, torch=read_torch())).fix
    assert step.startswith(f"remove {first} from Python's search path, or remove the torch in it; ")
    record = Record.make(environment, (), written_by="0.1.0", recorded="2026-11-22 19:44 UTC")
    text = record.to_text(Redaction())
    assert Record.from_text(text, source="").environment.torch == environment.torch
    jsonschema.validate(json.loads(text), SCHEMAS["record"], cls=jsonschema.Draft202012Validator)


@pytest.mark.usefixtures("site")
def test_the_place_of_a_new_torch_is_named_if_none_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    plant_torch(first, "2.5.0")
    plant_torch(second, "2.6.0")
    monkeypatch.setattr("sys.path", [str(first), str(second)])
    result = check_torch(replace(make_environment(HOPPER, "9.0"), torch=read_torch()))
    take = f"remove {first} from Python's search path, or remove the torch in it"
    assert result.fix == f"{take}, then `pip install 'torch>=2.10'`"


def test_a_link_to_the_same_torch_is_no_other_one(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = tmp_path / "view"
    view.mkdir()
    for folder in site.iterdir():
        (view / folder.name).symlink_to(folder)
    monkeypatch.setattr("sys.path", [str(view), str(site)])
    assert read_torch() == Torch("ok", "2.13.0", "13.0")


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
    assert torch.advise("2.10") == "`pip install --force-reinstall --no-deps torch==2.13.0`"


@pytest.mark.parametrize(
    ("others", "command"),
    [("", "`unset PYTHONPATH`"), ("/a:/b", "`export PYTHONPATH=/a:/b`")],
    ids=["alone", "among others"],
)
def test_a_folder_of_pythonpath_is_to_be_removed_from_it(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, others: str, command: str
) -> None:
    place = tmp_path / "named"
    plant(place / "torch.py")
    monkeypatch.setattr("sys.path", ["", str(place), str(site)])
    monkeypatch.setenv("PYTHONPATH", f"{place}:{others}")
    shadow = find_shadow("torch")
    assert shadow is not None
    assert shadow.fix == f"{command}: it names {place}, which Python searches first"


def test_a_file_from_neither_folder_nor_variable_is_to_be_renamed(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = plant(tmp_path / "pth" / "torch.py")
    monkeypatch.setattr("sys.path", ["", str(file.parent), str(site)])
    shadow = find_shadow("torch")
    assert shadow is not None
    assert shadow.fix == f"rename or remove {file}"


def test_the_installed_one_an_editable_one_and_an_empty_folder_are_no_shadows(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (Path.cwd() / "torch").mkdir()  # no module inside: Python searches on
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


@pytest.mark.parametrize(
    ("version", "fix"),
    [
        (
            "2.13.0+cu130",
            (
                "`pip install --force-reinstall --no-deps torch==2.13.0+cu130 --index-url "
                "https://download.pytorch.org/whl/cu130`"
            ),
        ),
        ("2.13.0a0+nv26.08", "install torch 2.13.0a0+nv26.08 again, from the same index"),
    ],
)
def test_a_torch_is_installed_again_from_where_it_came(site: Path, version: str, fix: str) -> None:
    (site / "torch" / "version.py").unlink()
    metadata = site / "torch-2.13.0.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace("Version: 2.13.0", f"Version: {version}"))
    assert read_torch().advise("2.10") == fix
