"""The check that recorded fingerprints are of the built kernels."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.wheels.fingerprints import (
    RECORDED,
    find_stale,
    keep_built,
    recordings_of,
)
from flash_dist.toolkit.selftest.fingerprints import read_references
from tests.unit.made.whole_wheel import make_declared
from tests.unit.toolkit.builds.test_manifest import make_kernel, make_manifest

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from flash_dist.toolkit.builds.manifest import Manifest


def test_records_cover_every_toolkit_and_both_kinds_of_code() -> None:
    references = read_references(RECORDED)
    kernels: defaultdict[str, set[str]] = defaultdict(set)
    for one in references:
        for name, code in one.kernels.items():
            kernels[name].add(code)
    assert {one.toolkit for one in references} == {one.toolkit for one in published_sets()}
    assert find_stale(references, kernels) == []
    drivers = {print_.driver for one in references for print_ in one.fingerprints}
    assert "" in drivers  # SASS
    assert drivers - {""}  # PTX that a driver compiled
    counts = {len(print_.digests) for one in references for print_ in one.fingerprints}
    # A case has 5 results, or 2 for decoding, 3 with max_logit, and 6 or 7 with gradients of
    # sinks and bias. After a change of its kernels a case has no record until the next recording.
    assert {2, 5, 6} <= counts <= {2, 3, 5, 6, 7}


def test_a_changed_kernel_is_found() -> None:
    references = read_references(RECORDED)[:1]
    kernels = {name: {code} for name, code in references[0].kernels.items()}
    name = min(kernels)
    (problem,) = find_stale(references, {**kernels, name: {"other"}})
    assert name in problem
    assert "1 of" in problem
    del kernels[name]
    assert len(find_stale(references, kernels)) == 1


def test_recordings_of_code_that_was_not_built_are_named_and_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    references = read_references(RECORDED)
    sets = {one.name: one for one in published_sets()}
    declared = replace(make_declared(), archsets=published_sets())

    def built(name: str) -> Manifest:
        toolkit = replace(declared.toolkit, cuda=sets[name].toolkit)
        return replace(declared, arch_set=sets[name], toolkit=toolkit)

    kept = keep_built(references, [built("hopper")])
    lines = capsys.readouterr().out.splitlines()
    assert {one.toolkit for one in kept} == {"13.0"}
    assert all(name.endswith("_sm90a") for one in kept for name in one.kernels)
    assert len(lines) == len(references) - len(kept) > 0
    assert any("no wheel has sm90a of CUDA 12.4" in line for line in lines)
    assert any("no wheel has compute80 of CUDA 13.0" in line for line in lines)
    assert keep_built(references, [built("all"), built("cuda12")]) == references
    assert capsys.readouterr().out == ""


def test_a_recording_of_kernels_that_are_gone_is_checked_where_its_target_was_built() -> None:
    declared = replace(make_declared(), archsets=published_sets())
    (wheel,) = [one for one in published_sets() if one.label == "hopper"]
    manifest = replace(declared, arch_set=wheel)
    native = [one for one in read_references(RECORDED) if one.toolkit == declared.toolkit.cuda]
    (first, *_) = keep_built(native, [manifest])
    renamed = replace(first, kernels={"gone_sm90a": "0"})
    assert keep_built([renamed], [manifest]) == (renamed,)
    assert len(find_stale([renamed], {})) == 1


def test_a_wheel_has_the_recordings_of_its_kernels_alone(tmp_path: Path) -> None:
    references = read_references(RECORDED)
    path = tmp_path / "fingerprints.json"
    declared = make_declared()
    for one in references:
        kernels = tuple(replace(make_kernel("sm_90a"), symbol=name) for name in one.kernels)
        toolkit = replace(declared.toolkit, cuda=one.toolkit)
        wheel = replace(declared, kernels=kernels, toolkit=toolkit)
        path.write_bytes(recordings_of(wheel)[RECORDED.name])
        assert read_references(path) == (one,)
    path.write_bytes(recordings_of(declared)[RECORDED.name])
    assert read_references(path) == ()
    assert recordings_of(declared, tmp_path / "none.json") == {}


def test_a_wheel_with_machine_code_has_no_recordings_of_ptx(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.json"
    references = read_references(RECORDED)
    compiled = [one for one in references if all("_compute" in name for name in one.kernels)]
    assert compiled  # on GPUs of compute capability 9.0
    for one in compiled:
        kernels = tuple(replace(make_kernel("compute_80"), symbol=name) for name in one.kernels)
        for archs, kept in (("8.0+PTX", (one,)), ("8.0+PTX 9.0a", ())):
            wheel = replace(make_manifest(archs), kernels=kernels)
            path.write_bytes(recordings_of(wheel)[RECORDED.name])
            assert read_references(path) == kept
