from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.gpucode.differences import Change, Differences, find_differences
from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from flash_dist.toolkit.gpucode.inspection import Choice, Inspection, inspect_library
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

SCHEMA = json.loads((Path(__file__).parents[4] / "docs/schema/inspect.json").read_text())
ALPHA = Kernel("alpha", registers=96, smem=1024)


def write(path: Path, *images: bytes) -> Path:
    path.write_bytes(library(container(*images)))
    return path


def read(path: Path, name: str = "") -> Inspection:
    with open_fatbin(path) as fatbin:
        return inspect_library(name or str(path), "", fatbin, Choice("kernels"))


def compare(tmp_path: Path, before: tuple[bytes, ...], after: tuple[bytes, ...]) -> Differences:
    sides = (
        [read(write(tmp_path / f"{name}.so", *images))]
        for name, images in (("a", before), ("b", after))
    )
    return find_differences(*sides)


def test_equal_libraries_do_not_differ(tmp_path: Path) -> None:
    images = (entry(SASS, 80, cubin(ALPHA)), entry(PTX, 80, ptx("alpha")))
    found = compare(tmp_path, images, images)
    assert not found
    assert {size.target for size in found.sizes} == {"sm_80", "compute_80"}
    assert all(size.before == size.after for size in found.sizes)


def test_a_resource_that_changed_is_named_with_both_numbers(tmp_path: Path) -> None:
    more = Kernel("alpha", registers=128, smem=1024)
    found = compare(tmp_path, (entry(SASS, 80, cubin(ALPHA)),), (entry(SASS, 80, cubin(more)),))
    (change,) = found.changes
    assert (change.what, change.kernel, change.target) == ("resource", "alpha", "sm_80")
    assert (change.resource, change.before, change.after) == ("registers", 96, 128)


def test_a_target_that_went_takes_its_kernels_along(tmp_path: Path) -> None:
    both = (entry(SASS, 80, cubin(ALPHA)), entry(SASS, 90, cubin(ALPHA), suffix="a"))
    found = compare(tmp_path, both, both[:1])
    assert [change.what for change in found.changes] == ["target", "kernel"]
    assert all((x.target, x.before, x.after) == ("sm_90a", 1, None) for x in found.changes)
    size = {size.target: size for size in found.sizes}["sm_90a"]
    assert (size.before.images, size.after.images) == (1, 0)


def test_kernels_of_one_name_are_compared_as_a_group(tmp_path: Path) -> None:
    def two(registers: int) -> tuple[bytes, ...]:
        other = Kernel("alpha", registers=registers, smem=1024)
        return entry(SASS, 80, cubin(ALPHA)), entry(SASS, 80, cubin(other))

    (change,) = compare(tmp_path, two(32), two(40)).changes
    assert (change.resource, change.before, change.after) == ("registers", 128, 136)
    (fewer,) = compare(tmp_path, two(32), two(32)[:1]).changes
    assert (fewer.what, fewer.before, fewer.after) == ("kernel", 2, 1)


def test_libraries_are_matched_by_name_where_there_are_several(tmp_path: Path) -> None:
    path = write(tmp_path / "lib.so", entry(SASS, 80, cubin(ALPHA)))
    first, second, third = (read(path, name) for name in ("one.so", "two.so", "three.so"))
    found = find_differences([first, second], [second, third])
    libraries = [(x.library, x.before, x.after) for x in found.of("library")]
    assert libraries == [("one.so", 1, None), ("three.so", None, 1)]
    assert not any(x.library == "two.so" for x in found.changes)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    wide = Kernel("_Z5alphaPf", registers=200)
    before = write(tmp_path / "old.so", entry(SASS, 80, cubin(Kernel("_Z5alphaPf", registers=32))))
    after = write(tmp_path / "new.so", entry(SASS, 80, cubin(wide)), entry(SASS, 120, cubin(wide)))
    return str(before), str(after)


def test_the_command_prints_what_changed(pair: tuple[str, str], cli: Cli) -> None:
    out, err = cli("inspect", "--diff", *pair)
    assert err == ""
    assert f"added: sm_120 in {pair[0]}" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["alpha", "sm_80", "registers", "32", "200"] in rows
    assert ["alpha", "sm_120", "added"] in rows
    assert main(["inspect", "--strict", "--diff", *pair]) == 1
    out = cli("inspect", "--strict", "--diff", pair[0], pair[0]).out
    assert "the same targets, kernels and resources" in out


def test_the_json_is_that_of_the_schema(pair: tuple[str, str], cli: Cli) -> None:
    document: dict[str, Any] = json.loads(cli("inspect", "--json", "--diff", *pair).out)
    jsonschema.validate(document, SCHEMA)
    assert (document["before"], document["after"]) == pair
    first = Change("target", pair[0], "sm_120", before=None, after=1)
    assert vars(first) in document["changes"]


def test_other_inputs_beside_a_comparison_are_refused(pair: tuple[str, str], cli: Cli) -> None:
    err = cli("inspect", "--diff", *pair, "--package", "torch", status=2).err
    assert "takes no --package, got torch" in err
