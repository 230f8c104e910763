"""Refusals of `nox -s release`."""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.compile.build_info import hash_sources
from flash_dist.toolkit.make.release.release import (
    ReleaseError,
    describe_publishing,
    find_problems,
    main,
    read_keyids,
    require_changelog,
    require_engine,
    require_tree,
)
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.make.wheels.fingerprints import RECORDED, recordings_of
from flash_dist.toolkit.make.wheels.platform_tags import platform_of
from flash_dist.toolkit.make.wheels.source import Source, SourceError
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.signed_release import make_pair, write_signed
from tests.unit.made.wheels import write_dist
from tests.unit.made.whole_wheel import BLOBS, FILES, NAME, make_files, write_whole_wheel
from tests.unit.toolkit.make.wheels.test_planted_releases import declare

if TYPE_CHECKING:
    from pathlib import Path

HOPPER = replace(
    ArchSet.parse("9.0a", name="hopper", label="hopper"), toolkit="13.0", budget_bytes=100_000
)
TAGGED = NAME.replace("manylinux_2_34_x86_64", platform_of(HOPPER.machine))
SOURCE = Source("c" * 40, BLOBS, hash_sources())
DATED = "# Changelog\n\n## 0.1.0, 2026-12-01\n\nThe first version.\n"


def tagged() -> dict[str, bytes]:
    return make_files(declare(files=FILES), platform=platform_of(HOPPER.machine))


def problems(
    dist: Path, *sets: ArchSet, version: str = "0.1.0", source: Source = SOURCE
) -> list[str]:
    return list(find_problems(find_artefacts(dist), sets or (HOPPER,), version, source))


def test_one_sound_wheel_of_every_set_is_a_release(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper", tagged(), name=TAGGED)
    assert problems(tmp_path) == []


def test_a_natively_built_wheel_is_refused(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper", make_files(declare(files=FILES)), name=NAME)
    (said,) = problems(tmp_path)
    assert "must have the platform tag `manylinux_2_28_x86_64`, has manylinux_2_34" in said


def test_a_natively_built_wheel_that_was_renamed_is_refused(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper", make_files(declare(files=FILES)), name=TAGGED)
    (said,) = problems(tmp_path)
    assert "was renamed: its file WHEEL has the tags py3-none-manylinux_2_34_x86_64" in said


FAULTS = {
    "older version": ({"version": "0.2.0"}, "is of version 0.1.0, released is 0.2.0"),
    "another commit": (
        {"source": replace(SOURCE, blobs={})},
        "was not built from commit cccccccccccc",
    ),
    "other kernels": ({"source": replace(SOURCE, sources="0")}, "CUDA"),
}


@pytest.mark.parametrize(("changes", "sentence"), FAULTS.values(), ids=FAULTS.keys())
def test_a_wheel_of_another_source_is_refused(
    tmp_path: Path, changes: dict[str, str], sentence: str
) -> None:
    write_whole_wheel(tmp_path / "hopper", tagged(), name=TAGGED)
    (said,) = problems(tmp_path, **changes)  # type: ignore[arg-type]
    assert sentence in said


def test_recordings_in_a_wheel_are_those_of_the_commit_for_its_kernels(tmp_path: Path) -> None:
    name, recorded = f"flash_dist/{RECORDED.name}", RECORDED.read_bytes()
    head = f"blob {len(recorded)}\0".encode()
    blob = hashlib.sha1(head + recorded, usedforsecurity=False).hexdigest()
    source = replace(SOURCE, blobs={**BLOBS, name: blob})
    declared = declare(files=(*FILES, RECORDED.name))
    (own,) = recordings_of(declared).values()
    for content, sentence in ((own, ""), (b"{}", name), (recorded, "")):
        made = {**make_files(declared, platform=platform_of(HOPPER.machine)), name: content}
        write_whole_wheel(tmp_path / "hopper", made, name=TAGGED)
        said = problems(tmp_path, replace(HOPPER, budget_bytes=1_000_000), source=source)
        assert sentence in "".join(said)
        assert bool(said) == bool(sentence), said


SETS = {
    "toolkit": (replace(HOPPER, toolkit="13.1"), "is built with CUDA 13.0, its set asks for 13.1"),
    "budget": (replace(HOPPER, budget_bytes=1000), "the budget is 1,000"),
    "targets": (
        replace(HOPPER, archs=ArchSet.parse("9.0a;10.0").archs),
        "requested was `9.0a;10.0`",
    ),
}


@pytest.mark.parametrize(("archset", "sentence"), SETS.values(), ids=SETS.keys())
def test_a_wheel_that_is_not_what_its_set_says_is_refused(
    tmp_path: Path, archset: ArchSet, sentence: str
) -> None:
    write_whole_wheel(tmp_path / "hopper", tagged(), name=TAGGED)
    (said,) = problems(tmp_path, archset)
    assert sentence in said


def test_a_set_without_a_wheel_and_a_wheel_without_a_set_are_refused(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper", tagged(), name=TAGGED)
    other = ArchSet.parse("8.0", name="ampere", label="ampere")
    assert problems(tmp_path, HOPPER, other) == ["there are 0 wheels of the set `ampere`, not one"]
    assert problems(tmp_path, other)[1] == f"{TAGGED} is of `hopper`, which is not published"


def test_two_wheels_of_one_set_are_refused(tmp_path: Path) -> None:
    write_whole_wheel(tmp_path / "hopper", tagged(), name=TAGGED)
    write_whole_wheel(tmp_path / "native", make_files(declare(files=FILES)), name=NAME)
    assert "there are 2 wheels of the set `hopper`, not one" in problems(tmp_path)


def test_every_wheel_of_a_folder_is_reported(tmp_path: Path) -> None:
    """Each wheel has the tag of a native build, and is refused in a sentence of its own."""
    said = problems(write_dist(tmp_path), *published_sets())
    assert len(said) == len(published_sets())


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "CHANGELOG.md").write_text(DATED)
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    return tmp_path


def test_a_committed_tree_of_a_dated_version_may_be_released(tree: Path) -> None:
    assert len(require_tree(tree, "0.1.0")) == 40
    git(tree, "tag", "-a", "v0.1.0", "-m", "0.1.0")  # as the workflow finds it
    assert len(require_tree(tree, "0.1.0")) == 40


@pytest.mark.parametrize("name", ["CHANGELOG.md", "new.txt"])
def test_an_uncommitted_tree_is_refused(tree: Path, name: str) -> None:
    (tree / name).write_text(f"{DATED}\nmore\n")
    with pytest.raises(ReleaseError, match=f"1 files are not committed, such as {name}"):
        require_tree(tree, "0.1.0")


@pytest.mark.parametrize("annotated", [("-a", "-m", "0.1.0"), ()], ids=["annotated", "light"])
def test_a_version_that_is_tagged_elsewhere_is_refused(
    tree: Path, annotated: tuple[str, ...]
) -> None:
    git(tree, "tag", *annotated, "v0.1.0")
    git(tree, "commit", "--quiet", "--allow-empty", "--message", "second")
    with pytest.raises(ReleaseError, match=r"0\.1\.0 is released: the tag v0\.1\.0 is of commit"):
        require_tree(tree, "0.1.0")


def test_sources_that_are_no_clone_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="is not in a git repository"):
        require_tree(tmp_path, "0.1.0")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("## 0.1.0, unreleased", "CHANGELOG.md says `0.1.0, unreleased`, a release has a date"),
        ("## 0.2.0, 2026-12-01", "pyproject.toml says 0.1.0, the newest of CHANGELOG.md is 0.2.0"),
        (
            "## 0.2.0, unreleased\n\n## 0.1.0, 2026-12-01",
            "the newest of CHANGELOG.md is 0.2.0, and 0.1.0 was released on 2026-12-01",
        ),
        ("", "the newest of CHANGELOG.md is nothing"),
    ],
    ids=["no date", "newer", "released", "empty"],
)
def test_a_version_that_the_changelog_does_not_release_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(ReleaseError) as caught:
        require_changelog(text, "0.1.0")
    assert sentence in caught.value.message


def test_a_tag_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tree", "--check", "--tag", "v9.9.9"]) == 1
    assert "the tag is `v9.9.9`, that of version" in capsys.readouterr().err


def test_without_an_engine_nothing_is_released(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="natively built wheels are not released"):
        require_engine({"PATH": str(tmp_path)})


def test_a_folder_without_an_index_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["publish", "--dist", str(tmp_path)]) == 1
    assert "lacks index, pypi, manifest.json, SHA256SUMS" in capsys.readouterr().err


def test_the_last_words_say_where_to_and_which_tag(tmp_path: Path) -> None:
    said = describe_publishing("0.1.0", "c" * 40, tmp_path, "https://example.org/")
    assert "copy index/ to https://example.org/" in said
    assert "git tag -a v0.1.0 -m 'flash_dist 0.1.0' cccccccccccc && git push origin v0.1.0" in said
    assert "1. sign: `FLASH_DIST_SIGNING_KEY=KEY nox -s release` again" in said
    assert "verify --manifest manifest.json FILE`" in said


def test_the_last_words_name_the_key_that_has_signed(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    write_signed(tmp_path / "dist", pair)
    keyids = read_keyids(tmp_path / "dist")
    assert keyids == [pair.signer.public_key.keyid]
    said = describe_publishing("0.1.0", "c" * 40, tmp_path, "", keyids)
    assert f"signed by {keyids[0][:12]}\n  1. copy index/ to your server of files" in said
    assert "put manifest.json, manifest.dsse.json, SHA256SUMS and provenance/ beside it" in said
    assert "verify --manifest manifest.json --key public.json FILE`" in said
    write_signed(tmp_path / "dist")
    assert read_keyids(tmp_path / "dist") == []
