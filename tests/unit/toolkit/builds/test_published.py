"""The published arch sets: one JSON file that builds and the installed package read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flash_dist.toolkit.builds.published import load_archsets, load_proofs, published_sets
from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.make.project import ARCHSETS

ROOT = Path(__file__).parents[4]
ONE = {"label": "one", "archs": "8.0", "who": "A100", "toolkit": "13.0", "budget_mb": 1.5}


def write(folder: Path, data: object) -> Path:
    path = folder / "archsets.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def changed(**values: Any) -> dict[str, Any]:  # noqa: ANN401 - wrong on purpose
    return {"set": {"one": ONE | values}}


def test_the_published_sets_are_as_designed() -> None:
    archsets = load_archsets()
    assert {name: (one.label, str(one)) for name, one in archsets.items()} == {
        "turing-ampere-ada": ("sm75to89", "7.5;8.0;8.6;8.9+PTX"),
        "hopper": ("hopper", "9.0a"),
        "blackwell": ("blackwell", "10.0;12.0"),
        "all": ("all", "7.5;8.0+PTX;9.0a;10.0;12.0"),
        "cuda12": ("sm75to90", "7.5;8.0;9.0a"),
        "arm": ("arm", "8.0+PTX;9.0a;10.0;11.0;12.0"),
    }
    assert all(one.who and one.budget_bytes for one in archsets.values())
    assert {one.name for one in archsets.values() if one.toolkit != "13.0"} == {"cuda12"}
    assert {one.name for one in archsets.values() if one.machine != "x86_64"} == {"arm"}
    assert len({one.label for one in archsets.values()}) == len(archsets)
    assert all((one.wheel_bytes or 0) < (one.budget_bytes or 0) for one in archsets.values())
    assert archsets["hopper"].to_json()["archs"] == "9.0a"


def test_builds_and_the_package_read_one_file() -> None:
    assert tuple(load_archsets(ARCHSETS).values()) == published_sets()


def test_proofs_name_targets() -> None:
    assert {str(arch): proof for arch, proof in load_proofs().items()} == {
        "sm_90a": "native",
        "compute_75": "jit",
        "compute_80": "jit",
        "compute_89": "jit",
    }


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "defines no arch set"),
        ("{", "cannot read arch sets"),
        ("[]", "`proof` is not an object"),
        ({"set": []}, "`set` is not an object"),
        ({"set": {"one": {key: ONE[key] for key in ONE if key != "who"}}}, "lacks who"),
        ({"set": {"one": "8.0"}}, "lacks archs, budget_mb, label, toolkit, who"),
        (changed(label="Too-Long"), "got `Too-Long`"),
        (changed(label="elevenchars"), "got `elevenchars`"),
        (changed(archs="5.2"), "cannot compile `sm_52`"),
        (changed(archs="8.3"), "unknown architecture `8.3` in arch set `one`"),
        (changed(budget_mb="2"), "budget_mb of arch set `one` .* is a number of MB, got `2`"),
        (changed(wheel_mb=-1), "got `-1`"),
        ({"proof": {"sm_90a": "sure"}}, "got `sure`"),
    ],
)
def test_a_wrong_file_is_refused_with_the_reason(tmp_path: Path, data: object, words: str) -> None:
    path = write(tmp_path, data)
    with pytest.raises(ArchError, match=words):  # noqa: PT012
        load_proofs(path)
        load_archsets(path)


def test_an_absent_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ArchError, match="cannot read arch sets"):
        load_archsets(tmp_path / "none.json")


def test_reading_them_needs_no_toml_module() -> None:
    script = (
        "import sys; sys.modules['tomllib'] = sys.modules['tomli'] = None; "
        "from flash_dist.toolkit.builds.published import published_sets; print(published_sets()[1])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "9.0a\n"


def test_sizes_are_in_millions_of_bytes(tmp_path: Path) -> None:
    archset = load_archsets(write(tmp_path, changed(wheel_mb=0.5)))["one"]
    assert (archset.budget_bytes, archset.wheel_bytes) == (1_500_000, 500_000)
    assert load_archsets(write(tmp_path, changed()))["one"].wheel_bytes is None
