"""Files beside the wheels of a release: manifest, checksums, statements, bills of materials."""

from __future__ import annotations

import hashlib
import json
import subprocess
from typing import TYPE_CHECKING

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from flash_dist.toolkit.builds.listing import read_listing
from flash_dist.toolkit.make.compile.build_info import hash_sources
from flash_dist.toolkit.make.compile.parts import find_cudart, find_parts
from flash_dist.toolkit.make.project import load_project
from flash_dist.toolkit.make.release.manifest import require_source, write_release
from flash_dist.toolkit.make.toolchain.nvcc import Toolchain, ToolchainError
from flash_dist.toolkit.make.toolchain.torch_headers import TorchHeaders
from flash_dist.toolkit.make.wheels import source as source_module
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from flash_dist.toolkit.make.wheels.source import Source, SourceError, read_source
from tests.unit.made.whole_wheel import (
    BLOBS,
    EMPTY,
    METADATA,
    NAME,
    SBOM,
    make_declared,
    make_files,
    write_whole_wheel,
)

if TYPE_CHECKING:
    from pathlib import Path


def release(dist: Path) -> dict[str, bytes]:
    write_whole_wheel(dist / "hopper")
    artefacts = find_artefacts(dist)
    return {
        str(path.relative_to(dist)): path.read_bytes()
        for path in write_release(dist, artefacts, None)
    }


def test_two_runs_give_the_same_bytes(tmp_path: Path) -> None:
    assert release(tmp_path / "one") == release(tmp_path / "two")


def test_checksums_are_those_that_sha256sum_checks(tmp_path: Path) -> None:
    release(tmp_path)
    lines = (tmp_path / "SHA256SUMS").read_text().splitlines()
    assert [line.partition("  ")[2] for line in lines] == [
        f"hopper/{NAME}",
        "manifest.json",
        f"provenance/{NAME}.intoto.json",
    ]
    for line in lines:
        digest, _, name = line.partition("  ")
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_the_packed_sources_are_listed_with_a_statement(tmp_path: Path) -> None:
    sources = tmp_path / f"flash_dist-{load_project().version}.tar.gz"
    sources.parent.mkdir(exist_ok=True)
    sources.write_bytes(b"sources")
    (tmp_path / "flash_dist-0.0.1.tar.gz").write_bytes(b"of another version")
    release(tmp_path)
    *_, entry = json.loads((tmp_path / "manifest.json").read_text())["artefacts"]
    assert (entry["kind"], entry["file"], entry["size"]) == ("sdist", sources.name, 7)
    digest = hashlib.sha256(b"sources").hexdigest()
    statement = json.loads((tmp_path / f"provenance/{sources.name}.intoto.json").read_text())
    assert statement["subject"] == [{"name": sources.name, "digest": {"sha256": digest}}]
    assert f"{digest}  {sources.name}\n" in (tmp_path / "SHA256SUMS").read_text()
    assert "0.0.1" not in (tmp_path / "SHA256SUMS").read_text()


def test_the_manifest_says_what_is_really_in_the_wheel(tmp_path: Path) -> None:
    release(tmp_path)
    (one,) = json.loads((tmp_path / "manifest.json").read_text())["artefacts"]
    assert one["set"] == "hopper"
    assert one["archs"] == ["sm_90a"]
    assert one["toolkit"]["nvcc"] == "13.0.88"
    assert one["torch"] == {"min": "2.10", "tested_max": "2.15"}
    listed = read_listing(tmp_path / "manifest.json").files[NAME]
    assert listed.size == (tmp_path / "hopper" / NAME).stat().st_size


def test_the_statement_has_target_and_flags_of_every_object(tmp_path: Path) -> None:
    files = release(tmp_path)
    statement = json.loads(files[f"provenance/{NAME}.intoto.json"])
    assert statement["_type"] == "https://in-toto.io/Statement/v1"
    assert statement["subject"][0]["name"] == NAME
    build = statement["predicate"]["buildDefinition"]
    assert build["internalParameters"]["objects"] == [
        {
            "source": "targets/sm_90a/fwd_d64.cu",
            "target": "sm_90a",
            "flags": ["-O3", "--compress-mode=size", "-gencode=arch=compute_90a,code=sm_90a"],
            "kernels": ["flash_dist_fwd_bf16_d64_smem64_sm90a"],
        }
    ]
    cudart = build["resolvedDependencies"][0]
    assert cudart["uri"] == "pkg:pypi/nvidia-cuda-runtime@13.0.96"
    assert cudart["digest"] == {"sha256": "a" * 64}


def test_a_wheel_that_does_not_verify_is_not_released(tmp_path: Path) -> None:
    files = {name: data for name, data in make_files().items() if name != SBOM}
    write_whole_wheel(tmp_path / "hopper", files)
    with pytest.raises(ArtefactError, match="is not released: the wheel holds 0 bills"):
        write_release(tmp_path, find_artefacts(tmp_path), None)
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize(
    "name",
    [
        "flash_dist.pth",
        "torch/__init__.py",
        "flash_dist-0.1.0+cu130.hopper.data/scripts/pip",
        "./flash_dist/__init__.py",
        "flash_dist/evil.py",
        "flash_dist-0.1.0+cu130.hopper.dist-info/licenses/LICENSE",
    ],
)
def test_no_wheel_is_of_a_commit_that_does_not_have_its_files(tmp_path: Path, name: str) -> None:
    write_whole_wheel(tmp_path / "hopper", {**make_files(), name: b"import os\n"})
    commit = Source("c" * 40, BLOBS, make_declared().sources)
    (one,) = find_artefacts(tmp_path)
    assert list(commit.differences(one)) == ["LICENSE" if name.endswith("LICENSE") else name]
    with pytest.raises(ArtefactError):
        write_release(tmp_path, [one], commit)


def test_the_description_is_that_of_the_commit(tmp_path: Path) -> None:
    files = make_files()
    write_whole_wheel(tmp_path / "hopper", {**files, METADATA: files[METADATA] + b"\nGo away\n"})
    commit = Source("c" * 40, BLOBS, make_declared().sources)
    (one,) = find_artefacts(tmp_path)
    assert list(commit.differences(one)) == ["README.md"]


def test_the_bill_is_valid_cyclonedx() -> None:
    bill = make_files()[SBOM].decode()
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(bill) is None
    assert bill == make_files()[SBOM].decode()


def _git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def test_a_wheel_is_of_the_commit_or_not(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper")
    (one,) = find_artefacts(tmp_path)
    commit = Source("c" * 40, BLOBS, "")
    require_source(one, commit)
    for other in (
        Source("c" * 40, {**BLOBS, "flash_dist/__init__.py": "0" * 40}, ""),
        Source("c" * 40, {**commit.blobs, "flash_dist/new.py": EMPTY}, ""),
        Source("c" * 40, {}, ""),
        Source("c" * 40, commit.blobs, "other kernels"),
    ):
        with pytest.raises(ArtefactError, match="was not built from commit cccccccccccc"):
            require_source(one, other)


def test_a_wheel_of_another_toolkit_is_not_blamed_on_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = {"flash_dist/product.json": b'{"built_with": "fatwheel 0.0.9 (SHA-256 aa)"}'}
    write_whole_wheel(tmp_path / "hopper", {**make_files(), **product})
    (one,) = find_artefacts(tmp_path)
    monkeypatch.setattr(source_module, "EMBEDDED", False)
    with pytest.raises(ArtefactError) as caught:
        require_source(one, Source("c" * 40, {}, "other kernels"))
    told = f"`{one.file_name}` was built with fatwheel 0.0.9 (SHA-256 aa), and this is fatwheel"
    assert caught.value.message.startswith(told)
    assert str(caught.value.hint).startswith("build it again; ")
    monkeypatch.setattr(source_module, "name_toolkit", lambda: "fatwheel 0.0.9 (SHA-256 aa)")
    with pytest.raises(ArtefactError, match="was not built from commit cccccccccccc"):
        require_source(one, Source("c" * 40, {}, "other kernels"))


def test_a_tree_with_changes_is_no_commit(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not in a git repository"):
        read_source(tmp_path)
    _git(tmp_path, "init", "--quiet")
    file = tmp_path / "flash_dist" / "__init__.py"
    file.parent.mkdir()
    file.write_text("")
    kernel = tmp_path / "csrc" / "kernel.cu"
    kernel.parent.mkdir()
    kernel.write_text("// one")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "first")
    source = read_source(tmp_path)
    assert source.sources == hash_sources(tmp_path)
    kernel.write_text("// another")
    assert source.sources != hash_sources(tmp_path)
    kernel.write_text("// one")
    assert len(source.commit) == 40
    assert list(source.blobs) == ["flash_dist/__init__.py"]
    file.write_text("changed = True\n")
    with pytest.raises(SourceError, match="1 files that wheels are built from are not committed"):
        read_source(tmp_path)


def test_parts_are_those_that_were_linked(tmp_path: Path) -> None:
    home = tmp_path / "site" / "nvidia" / "cu13"
    (home / "lib").mkdir(parents=True)
    (home / "lib" / "libcudart_static.a").write_bytes(b"archive")
    (tmp_path / "site" / "nvidia_cuda_runtime-13.0.96.dist-info").mkdir()
    cache = tmp_path / "CMakeCache.txt"
    cache.write_text(f"CUDART:FILEPATH={home}/lib/libcudart_static.a\n")
    headers = TorchHeaders(tmp_path, "2.13.0", "test")
    parts = {
        part.name: part
        for part in find_parts(tmp_path, Toolchain(home, "13.0.88", "13.0.88"), headers)
    }
    cudart = parts["cudart_static"]
    assert (cudart.version, cudart.how) == ("13.0.96", "static")
    assert cudart.sha256 == hashlib.sha256(b"archive").hexdigest()
    assert parts["libdevice"].version == "13.0.88"  # another toolkit's version
    cache.write_text("")
    with pytest.raises(ToolchainError, match="does not say which"):
        find_cudart(tmp_path)
