"""The separate wheel of the toolkit: its version, and the check that its sources are these."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import TOOLKIT, load_project
from flash_dist.toolkit.make.release.toolkit_wheel import FOLDER, check, require_version
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from tests.unit.made.whole_wheel import write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

NAME = "fatwheel-0.1.0-py3-none-any.whl"


def write(dist: Path, files: dict[str, bytes]) -> Path:
    path = dist / FOLDER / NAME
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(f"fatwheel/{name}", data)
        wheel.writestr("fatwheel-0.1.0.dist-info/METADATA", b"")
    return path


def modules() -> dict[str, bytes]:
    return {one.relative_to(TOOLKIT).as_posix(): one.read_bytes() for one in TOOLKIT.rglob("*.py")}


def test_both_packages_have_one_version() -> None:
    require_version(load_project().version)
    with pytest.raises(ArtefactError, match=r"flash_dist is 9\.9, fatwheel is .* together"):
        require_version("9.9")


def test_the_wheel_is_of_these_sources(tmp_path: Path) -> None:
    assert check(tmp_path, ()) == []
    path = write(tmp_path, modules())
    (published,) = check(tmp_path, ())
    assert (published.path, published.wheel) == (path, None)


@pytest.mark.parametrize("fault", ["changed", "missing"])
def test_a_wheel_of_other_sources_is_refused(fault: str, tmp_path: Path) -> None:
    files = modules()
    if fault == "changed":
        files["errors.py"] += b"\n"
    else:
        del files["errors.py"]
    write(tmp_path, files)
    with pytest.raises(ArtefactError, match="is not the toolkit of these sources"):
        check(tmp_path, ())


def test_it_is_no_wheel_of_kernels(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper")
    before = find_artefacts(tmp_path)
    write(tmp_path, modules())
    assert find_artefacts(tmp_path) == before
