"""`verify`: a whole wheel passes, and every planted fault has its own id."""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.builds.contents import MANIFEST
from flash_dist.toolkit.builds.listing import read_listing
from flash_dist.toolkit.builds.manifest import declare_build
from flash_dist.toolkit.checks.install import check_build
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import ManifestError
from tests.unit.made.builds import HOPPER, make_environment
from tests.unit.made.names import BINDING, KERNELS
from tests.unit.made.whole_wheel import (
    INFO,
    NAME,
    RECORD,
    SBOM,
    make_declared,
    make_files,
    make_record,
    write_whole_wheel,
)
from tests.unit.toolkit.cli.test_schemas import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.unit.made.command import Cli

    Files = dict[str, bytes]


def write_listing(folder: Path, wheel: Path, **changes: object) -> Path:
    data = wheel.read_bytes()
    one = {"file": wheel.name, "sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}
    path = folder / "manifest.json"
    path.write_text(json.dumps({"version": 1, "artefacts": [{**one, **changes}]}))
    return path


def failures(path: Path) -> dict[str, str]:
    return {result.name: result.id for result in verify_wheel(path).results if not result}


def test_a_whole_wheel_passes_and_is_the_one_released(tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path)
    found = verify_wheel(wheel, read_listing(write_listing(tmp_path, wheel)))
    assert [(one.name, one.status) for one in found.results] == [
        ("manifest", "ok"),
        ("archive", "ok"),
        ("files", "ok"),
        ("record", "ok"),
        ("metadata", "ok"),
        ("audit", "ok"),
        ("sbom", "ok"),
    ]
    assert found


def test_a_download_that_was_cut_short_is_called_so(tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    archive = next(one for one in verify_wheel(wheel).results if one.name == "archive")
    assert archive.id == "verify-archive"
    assert "the file was cut short" in archive.details[0]


def test_an_obstacle_to_all_checks_is_printed_once(tmp_path: Path, cli: Cli) -> None:
    wheel = write_whole_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    out = cli("verify", wheel, status=1).out
    assert out.count("it is not a wheel") == 1
    assert "likewise: record, metadata, audit, sbom" in out


def test_a_folder_is_told_what_verify_takes(tmp_path: Path, cli: Cli) -> None:
    out = cli("verify", tmp_path, status=1).out
    assert "it is a folder" in out
    assert "pass the wheels in it" in out


def test_without_a_manifest_nobody_says_that_it_was_released(tmp_path: Path) -> None:
    found = verify_wheel(write_whole_wheel(tmp_path))
    assert found
    assert found.results[0].status == "skip"


def change(name: str, old: bytes, new: bytes) -> Callable[[Files], Files]:
    def apply(files: Files) -> Files:
        assert old in files[name]
        return {**files, name: files[name].replace(old, new, 1)}

    return apply


def without(name: str) -> Callable[[Files], Files]:
    return lambda files: {key: data for key, data in files.items() if key != name}


# Each change made before RECORD is written, and the expected findings.
FAULTS: dict[str, tuple[Callable[[Files], Files], dict[str, str]]] = {
    "nothing": (lambda files: files, {}),
    "no bill of materials": (without(SBOM), {"sbom": "verify-sbom-missing"}),
    "bill that is no JSON": (
        lambda files: {**files, SBOM: b"{"},
        {"sbom": "verify-sbom-differs"},
    ),
    "bill of nothing": (lambda files: {**files, SBOM: b"[]"}, {"sbom": "verify-sbom-differs"}),
    "bill of another version": (
        change(SBOM, b'"version": "0.1.0+cu130.hopper"', b'"version": "0.2.0+cu130.hopper"'),
        {"sbom": "verify-sbom-differs"},
    ),
    "bill of other targets": (
        change(SBOM, b'"sm_90a"', b'"sm_100"'),
        {"sbom": "verify-sbom-differs"},
    ),
    "bill of an older cudart": (
        change(SBOM, b'"version": "13.0.96"', b'"version": "13.0.48"'),
        {"sbom": "verify-sbom-differs"},
    ),
    "binding of another build": (
        lambda files: {**files, BINDING: files[BINDING] + b"\0"},
        {"sbom": "verify-sbom-differs"},
    ),
    "stray library": (
        lambda files: {**files, "flash_dist/libx.so": b"\x7fELF"},
        {
            "files": "verify-foreign-file",
            "audit": "verify-audit",
            "sbom": "verify-sbom-differs",
        },
    ),
    "stale _build.json": (
        change(MANIFEST, b'"registers": 168', b'"registers": 255'),
        {"audit": "verify-audit"},
    ),
    "_build.json of another target": (
        lambda files: {**files, MANIFEST: files[MANIFEST].replace(b"9.0a", b"10.0")},
        {"audit": "verify-audit", "sbom": "verify-sbom-differs"},
    ),
    "no library": (
        without(KERNELS),
        {"files": "verify-foreign-file"}
        | dict.fromkeys(("metadata", "audit", "sbom"), "verify-unread"),
    ),
    "no _build.json": (
        without(MANIFEST),
        dict.fromkeys(("files", "metadata", "audit", "sbom"), "verify-unread"),
    ),
}


@pytest.mark.parametrize(("fault", "noticed"), FAULTS.values(), ids=FAULTS.keys())
def test_a_changed_wheel_with_a_right_record_is_noticed(
    fault: Callable[[Files], Files], noticed: dict[str, str], tmp_path: Path
) -> None:
    assert failures(write_whole_wheel(tmp_path, fault(make_files()))) == noticed


METADATA = f"{INFO}/METADATA"
RECORDS: dict[str, tuple[Callable[[Files], Files], Callable[[bytes], bytes]]] = {
    "changed byte": (change(METADATA, b"3.10", b"3.11"), lambda record: record),
    "longer file": (change(METADATA, b"3.10", b"3.10.1"), lambda record: record),
    "file that is not listed": (
        lambda files: {**files, "flash_dist/extra.py": b"import os"},
        lambda record: record,
    ),
    "file that is gone": (without("flash_dist/__init__.py"), lambda record: record),
    "file without a hash": (
        lambda files: files,
        lambda record: _edit_line(record, METADATA, f"{METADATA},,"),
    ),
    "hash that is none": (
        lambda files: files,
        lambda record: _edit_line(record, METADATA, f"{METADATA},sha256=%,1"),
    ),
    "weaker hash": (
        lambda files: files,
        lambda record: record.replace(b"sha256=", b"md5=", 1),
    ),
    "line twice": (
        lambda files: files,
        lambda record: record + record.splitlines(keepends=True)[0],
    ),
    "line that is none": (lambda files: files, lambda record: record + b"junk\n"),
    "empty": (lambda files: files, lambda _: b""),
}


def _edit_line(record: bytes, name: str, new: str) -> bytes:
    lines = record.decode().splitlines()
    return "\n".join(new if line.startswith(f"{name},") else line for line in lines).encode()


@pytest.mark.parametrize(("fault", "edit"), RECORDS.values(), ids=RECORDS.keys())
def test_a_wheel_that_is_not_as_its_record_is_noticed(
    fault: Callable[[Files], Files], edit: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    files = make_files()
    wheel = write_whole_wheel(tmp_path, fault(files), edit(make_record(files)))
    assert failures(wheel)["record"] == "verify-record"


def test_a_wheel_without_record_is_noticed(tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes().replace(RECORD.encode(), RECORD[:-1].encode() + b"X"))
    assert failures(wheel) == {
        "archive": "verify-archive",  # both names were changed, but not in the local header
        "files": "verify-foreign-file",
        "record": "verify-record",
    }


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"sha256": "0" * 64}, "verify-checksum"),
        ({"size": 1}, "verify-checksum"),
        ({"file": "flash_dist-0.1.0+cu130.all-py3-none.whl"}, "verify-not-listed"),
    ],
)
def test_a_wheel_that_was_not_released_is_noticed(
    changes: dict[str, Any], name: str, tmp_path: Path
) -> None:
    wheel = write_whole_wheel(tmp_path)
    found = verify_wheel(wheel, read_listing(write_listing(tmp_path, wheel, **changes)))
    assert [result.id for result in found.results if not result] == [name]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "artefacts": []}',
        '{"version": 1}',
        '{"version": 1, "artefacts": [{"file": "a", "sha256": "A", "size": 1}]}',
        '{"version": 1, "artefacts": [{"file": "a", "size": 1}]}',
        '{"version": 1, "artefacts": "a"}',
    ],
)
def test_a_manifest_that_is_none_is_a_sentence(text: str, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(ManifestError, match="manifest"):
        read_listing(path)
    assert main(["verify", "--manifest", str(path), str(write_whole_wheel(tmp_path))]) == 2


def test_a_sound_wheel_of_others_is_named_without_findings(tmp_path: Path, cli: Cli) -> None:
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("other/__init__.py", "")
        archive.writestr("other-1.0.dist-info/METADATA", "Name: other\nVersion: 1.0\n")
    out = cli("verify", wheel, status=3).out
    assert re.search(r"it is of other and has no record of its build", out)
    assert f"fix: `python -m flash_dist audit {wheel}` judges" in out
    assert "install" not in out
    assert main(["verify", str(wheel), str(write_whole_wheel(tmp_path / "good"))]) == 3
    named = wheel.rename(tmp_path / NAME)
    assert main(["verify", str(named)]) == 1


def test_a_sound_wheel_says_what_was_compared(tmp_path: Path) -> None:
    said = {one.name: one.summary for one in verify_wheel(write_whole_wheel(tmp_path)).results}
    assert said["files"] == (
        "3 modules and data that _build.json lists, 2 libraries, a dist-info: "
        "no file more, none less"
    )


@pytest.mark.parametrize("content", [b"", b"PK", None])
def test_unreadable_files_fail(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / NAME
    if content is not None:
        path.write_bytes(content)
    found = verify_wheel(path)
    assert not found
    assert {result.id for result in found.results if not result} <= {
        "verify-archive",
        "verify-unread",
    }


@pytest.mark.parametrize("name", ["flash_dist-0.1.0.tar.gz", "flash_dist.pyz"])
def test_only_the_manifest_covers_sources_and_program(name: str, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / name
    path.write_bytes(b"packed")
    listing = write_listing(tmp_path, path)
    assert "as released" in cli("verify", path, "--manifest", listing).out
    assert "only a manifest can" in cli("verify", path, status=3).out
    document = json.loads(cli("verify", "--json", path, status=3).out)
    check("verify", document)
    assert (document["passed"], document["exit_code"]) == (False, 3)
    path.write_bytes(b"pecked")
    found = verify_wheel(path, read_listing(listing))
    assert [result.id for result in found.results if not result] == ["verify-checksum"]
    assert main(["verify", str(path), str(write_whole_wheel(tmp_path / "good"))]) == 3
    assert main(["verify", str(path), str(tmp_path / "absent.whl")]) == 1


def test_doctor_audit_and_verify_count_kernels_alike(tmp_path: Path) -> None:
    wheel = write_whole_wheel(tmp_path)
    counts = declare_build(make_declared()).counts
    assert counts == "1 kernel in 1 variant"
    said = {result.name: result.summary for result in verify_wheel(wheel).results}
    assert said["audit"].startswith(f"{counts} for sm_90a")
    build = check_build(make_environment(HOPPER, "9.0"))
    assert re.search(r" [0-9]+ kernels in [0-9]+ variants for ", build.summary)


def test_the_command_prints_checks_json_and_a_count(tmp_path: Path, cli: Cli) -> None:
    good = write_whole_wheel(tmp_path / "good")
    bad = write_whole_wheel(tmp_path / "bad", without(SBOM)(make_files()))
    out = cli("verify", good).out
    assert "[ok]    sbom" in out
    assert out.splitlines()[-1] == (
        "who built this is unknown: only the manifest of a release says, see --manifest"
    )
    assert "who built" not in cli("verify", good, "--manifest", write_listing(tmp_path, good)).out
    lines = cli("verify", good, bad, "--json", status=1).out.splitlines()
    for line in lines:
        check("verify", json.loads(line))
    assert [json.loads(line)["passed"] for line in lines] == [True, False]
    out = cli("verify", "-q", good, bad, status=1).out
    assert "1 of 2 files passed; who built them is unknown: " in out
    assert "explain verify-sbom-missing" in out
