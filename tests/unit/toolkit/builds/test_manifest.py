from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import flash_dist
from flash_dist.toolkit.builds.manifest import (
    Assembled,
    HostInfo,
    KernelRecord,
    Manifest,
    TargetInfo,
    ToolkitInfo,
    declare_build,
    load_manifest,
)
from flash_dist.toolkit.errors import ManifestError
from flash_dist.toolkit.machine.installed import combine
from flash_dist.toolkit.targets.archs import Arch, ArchSet
from flash_dist.toolkit.targets.axes import Place
from flash_dist.toolkit.targets.fallbacks import Fallbacks

if TYPE_CHECKING:
    from pathlib import Path


FACTS = Fallbacks({"bwd_fused": ("bwd_dkdv", "bwd_dq_recompute")}, frozenset({"fwd_sm90"}))


def make_kernel(target: str = "sm_90a", **changes: Any) -> KernelRecord:  # noqa: ANN401
    arch = Arch.parse(target)
    values: dict[str, Any] = {
        "symbol": f"flash_dist_fwd_bf16_d64_smem64_{arch.identifier}",
        "family": "fwd",
        "place": Place(("bf16",), (64, 64), 64),
        "target": arch,
        "registers": None if arch.ptx else 168,
        "spill_bytes": None if arch.ptx else 0,
        "stack_bytes": None if arch.ptx else 0,
        "static_smem": None if arch.ptx else 0,
        "dynamic_smem": 49152,
        "threads": 128,
        "proof": "native",
    }
    if arch.ptx:
        values["assembled_for"] = (Assembled(Arch(arch.major, arch.minor), 168, 0),)
    return KernelRecord(**{**values, **changes})


def make_manifest(archs: str = "8.0+PTX;9.0a", **changes: Any) -> Manifest:  # noqa: ANN401
    archset = ArchSet.parse(archs, name="hopper", label="hopper")
    values: dict[str, Any] = {
        "package_version": "0.1.0+cu130.hopper",
        "arch_set": archset,
        "archsets": (archset,),
        "toolkit": ToolkitInfo("13.0", "13.0.88", "13.0.88", "580", "9.0"),
        "host": HostInfo("g++ 12.2.0", "2.36"),
        "flags": ("-O3", "--compress-mode=size", *archset.gencode_flags),
        "torch_headers": "2.13.0",
        "torch_min": "2.10",
        "torch_tested_max": "2.15",
        "targets": tuple(TargetInfo(arch, "assembled") for arch in archset.archs),
        "kernels": tuple(make_kernel(str(arch)) for arch in archset.archs),
        "files": ("__init__.py", "archsets.json", "py.typed"),
    }
    return Manifest(**{**values, **changes})


@pytest.mark.parametrize("facts", [None, FACTS], ids=["not stated", "stated"])
def test_the_text_round_trips(facts: Fallbacks | None) -> None:
    manifest = make_manifest(fallbacks=facts)
    assert Manifest.from_text(manifest.to_text(), source="test") == manifest
    installed = combine(manifest, declare_build(manifest).variants).build
    assert installed is not None
    assert installed.told_fallbacks == facts


def test_equal_manifests_are_one_key_of_a_dict() -> None:
    points = {"vllm.general_plugins": ("flash_dist = flash_dist.integrations.vllm:register",)}
    one, other = (make_manifest(fallbacks=FACTS, entry_points=dict(points)) for _ in range(2))
    assert {one: 1}[other] == 1


def test_a_manifest_of_an_earlier_build_states_no_fallbacks() -> None:
    data = make_manifest().to_json()
    del data["fallbacks"]
    assert Manifest.from_json(data) == make_manifest()


def test_the_text_has_one_line_per_kernel() -> None:
    manifest = make_manifest()
    lines = [line for line in manifest.to_text().splitlines() if '{"symbol"' in line]
    assert len(lines) == len(manifest.kernels)


def test_keys_of_a_newer_writer_are_left_alone() -> None:
    data = make_manifest().to_json()
    data["kernels"][0]["new"] = 1
    data["newer"] = {}
    assert Manifest.from_json(data) == make_manifest()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"version": 2}, "must have version 1, got 2"),
        ({"toolkit": None}, "malformed"),
        ({"kernels": [{"symbol": "x"}]}, "lacks 'target'"),
        ({"fallbacks": {"stand_ins": {}}}, "lacks 'leaves_half_filled'"),
        ({"product": {"name": "x"}}, "lacks 'axes'"),
        (
            {"product": {"name": "x", "axes": [{"name": "(", "rule": "last"}]}},
            "malformed: the name",
        ),
        (
            {"fallbacks": {**FACTS.to_json(), "stand_ins": {"a": "b"}}},
            "`a` must be a list of names",
        ),
        ({"fallbacks": {**FACTS.to_json(), "stand_ins": {"a": []}}}, "must name at least one role"),
        ({"kernels": [{"symbol": "x", "target": "sm_banana"}]}, "sm_banana"),
    ],
    ids=[
        "version",
        "null",
        "kernel without fields",
        "fallbacks without a key",
        "product without axes",
        "an axis with a malformed name",
        "text for a list",
        "no stand-in",
        "unknown target",
    ],
)
def test_a_malformed_manifest_is_an_error_that_says_where(
    change: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ManifestError, match=sentence):
        Manifest.from_json({**make_manifest().to_json(), **change})


@pytest.mark.parametrize("key", ["arch_set", "toolkit", "kernels", "package_version"])
def test_a_missing_key_is_named(key: str) -> None:
    data = make_manifest().to_json()
    del data[key]
    with pytest.raises(ManifestError, match=key):
        Manifest.from_json(data)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"version": 1, "version": 1}', '{"version": NaN}']
)
def test_a_file_that_is_no_manifest_is_an_error(text: str) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_text(text, source="test")


def test_a_package_that_was_not_built_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="was not built"):
        load_manifest(tmp_path)


def test_an_installed_manifest_is_read(tmp_path: Path) -> None:
    (tmp_path / "_build.json").write_text(json.dumps(make_manifest().to_json()))
    assert load_manifest(tmp_path) == make_manifest()


def test_the_source_tree_has_a_version_of_its_own() -> None:
    assert flash_dist.__version__ == "0+unbuilt"


def test_an_unknown_attribute_of_the_package_is_an_error() -> None:
    with pytest.raises(AttributeError, match="`nonsense`"):
        flash_dist.nonsense  # noqa: B018
