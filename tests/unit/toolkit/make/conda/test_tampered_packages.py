"""Tampered conda packages with a valid paths.json: the check that rejects each."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.audit.verify import verify_wheel
from flash_dist.toolkit.builds.entry_points import make_link
from flash_dist.toolkit.make.project import load_project
from tests.unit.made.fatbin_builder import zstd
from tests.unit.made.hostile import HOSTILE, places, put
from tests.unit.made.signed_release import REFUSED_BY, deceive
from tests.unit.made.whole_wheel import INFO
from tests.unit.toolkit.make.conda.test_pack import pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SITE = "site-packages/"
INIT = f"{SITE}flash_dist/__init__.py"
EVIL_LINK = (
    json.dumps(make_link(load_project().scripts))
    .replace("flash_dist.__main__:run", "evil:main")
    .encode()
)


@dataclass
class Package:
    """An unpacked package; members are written in order."""

    name: str
    outer: dict[str, bytes]
    info: dict[str, bytes]
    files: dict[str, bytes]
    entries: list[tarfile.TarInfo]  # additional members of the archive
    behind: bytes = b""
    modes: dict[str, int] | None = None

    def tell(self, **changes: object) -> None:
        """Change index.json."""
        index = {**json.loads(self.info["info/index.json"]), **changes}
        self.info["info/index.json"] = json.dumps(index).encode()

    def list_paths(self, **changes: object) -> None:
        """Write paths.json of the files, with changes to the first."""
        paths: list[dict[str, Any]] = [
            {
                "_path": name,
                "path_type": "hardlink",
                "sha256": hashlib.sha256(data).hexdigest(),
                "size_in_bytes": len(data),
            }
            for name, data in self.files.items()
        ]
        paths[0].update(changes)
        self.info["info/paths.json"] = json.dumps({"paths": paths, "paths_version": 1}).encode()

    def write(self, path: Path) -> Path:
        stem = self.name.removesuffix(".conda")
        target = path.with_name(self.name)
        packed = _tar(self.files, self.entries, self.modes or {}) + self.behind
        with zipfile.ZipFile(target, "w") as archive:
            for name, data in self.outer.items():
                archive.writestr(zipfile.ZipInfo(name), data)
            archive.writestr(zipfile.ZipInfo(f"pkg-{stem}.tar.zst"), zstd.compress(packed))
            info = zstd.compress(_tar(self.info, [], {}))
            archive.writestr(zipfile.ZipInfo(f"info-{stem}.tar.zst"), info)
        return target


def _tar(files: dict[str, bytes], entries: list[tarfile.TarInfo], modes: dict[str, int]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), modes.get(name, 0o644)
            archive.addfile(member, io.BytesIO(data))
        for entry in entries:
            archive.addfile(entry)
    return out.getvalue()


def take_apart(path: Path) -> Package:
    parts: dict[str, dict[str, bytes]] = {}
    with zipfile.ZipFile(path) as archive:
        outer = {"metadata.json": archive.read("metadata.json")}
        for kind in ("info", "pkg"):
            data = zstd.decompress(archive.read(f"{kind}-{path.stem}.tar.zst"))
            with tarfile.open(fileobj=io.BytesIO(data)) as members:
                parts[kind] = {
                    one.name: file.read()
                    for one in members
                    if (file := members.extractfile(one)) is not None
                }
    return Package(path.name, outer, parts["info"], parts["pkg"], [])


def add(name: str, data: bytes = b"import os\n") -> Callable[[Package], None]:
    def apply(package: Package) -> None:
        package.files[name] = data
        package.list_paths()

    return apply


def inform(name: str, data: bytes = b"{}") -> Callable[[Package], None]:
    return lambda package: package.info.update({name: data})


def tell(**changes: object) -> Callable[[Package], None]:
    return lambda package: package.tell(**changes)


def depend(*more: str) -> Callable[[Package], None]:
    def apply(package: Package) -> None:
        package.tell(depends=[*json.loads(package.info["info/index.json"])["depends"], *more])

    return apply


def entry(kind: bytes, name: str = f"{SITE}flash_dist/x.py", target: str = "") -> Any:  # noqa: ANN401
    def apply(package: Package) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        package.entries.append(member)

    return apply


def rename(package: Package) -> None:
    package.name = package.name.replace("flash-dist-0.1.0", "flash-dist-9.9.9")


def call_torch(package: Package) -> None:
    package.name = package.name.replace("flash-dist", "pytorch")
    package.tell(name="pytorch")


def set_mode(package: Package) -> None:
    package.modes = {INIT: 0o4755}


def drop_link(package: Package) -> None:
    del package.info["info/link.json"]


def put_behind(package: Package) -> None:
    package.behind = b"MZ" * 512


TAMPERED: dict[str, tuple[set[str], Callable[[Package], None]]] = {
    "post-link script": ({"paths", "files", "record"}, add("bin/.flash-dist-post-link.sh")),
    "activation script": ({"paths", "files", "record"}, add("etc/conda/activate.d/x.sh")),
    "pth": ({"files", "record"}, add(f"{SITE}flash_dist.pth")),
    "another package": ({"files", "record"}, add(f"{SITE}torch/__init__.py")),
    "entry points of the wheel": ({"metadata", "record"}, add(f"{SITE}{INFO}/entry_points.txt")),
    "link.json without the script": (
        {"package"},
        inform("info/link.json", b'{"noarch": {"type": "python"}}'),
    ),
    "link.json with another script": ({"package"}, inform("info/link.json", EVIL_LINK)),
    "no link.json": ({"package"}, drop_link),
    "recipe": ({"package"}, inform("info/recipe/meta.yaml")),
    "tests": ({"package"}, inform("info/test/run_test.sh")),
    "run exports": ({"package"}, inform("info/run_exports.json")),
    "prefix that is written": (
        {"package"},
        lambda package: package.list_paths(prefix_placeholder="/opt/x", file_mode="text"),
    ),
    "soft link in paths.json": (
        {"package"},
        lambda package: package.list_paths(path_type="softlink"),
    ),
    "no link": ({"package"}, lambda package: package.list_paths(no_link=True)),
    "foreign dependency": ({"package"}, depend("evil-package")),
    "dependency of a channel": ({"package"}, depend("evil::rich")),
    "pinned dependency": ({"package"}, tell(depends=["python >=3.10", "pytorch 2.10.evil"])),
    "other GPUs": ({"package"}, tell(constrains=["__cuda_arch >=7.5"])),
    "features": ({"package"}, tell(track_features="evil")),
    "another name in index.json": ({"package"}, tell(name="pytorch")),
    "called pytorch": ({"package"}, call_torch),
    "renamed": ({"package"}, rename),
    "higher build number": ({"package"}, tell(build_number=99)),
    "another platform": ({"package"}, tell(subdir="linux-aarch64")),
    "not for all Pythons": ({"package"}, tell(noarch=None)),
    "about.json with more": ({"package"}, inform("info/about.json", b'{"extra": {}}')),
    "symbolic link": ({"archive"}, entry(tarfile.SYMTYPE, target="/etc/passwd")),
    "hard link": ({"archive"}, entry(tarfile.LNKTYPE, target="/etc/passwd")),
    "device": ({"archive"}, entry(tarfile.CHRTYPE)),
    "folder": ({"archive"}, entry(tarfile.DIRTYPE, f"{SITE}torch")),
    "setuid": ({"archive"}, set_mode),
    "bytes behind the end": ({"archive"}, put_behind),
    "one more member": (
        {"archive"},
        lambda package: package.outer.update({"evil.sh": b"rm -r /\n"}),
    ),
    "another format": (
        {"archive"},
        lambda package: package.outer.update({"metadata.json": b'{"conda_pkg_format_version": 3}'}),
    ),
    "changed module": ({"record"}, add(INIT)),
}


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(tmp_path_factory.mktemp("conda"))


@pytest.mark.parametrize(("refused_by", "change"), TAMPERED.values(), ids=TAMPERED.keys())
def test_a_tampered_package_is_refused_by_the_check_that_looks_there(
    refused_by: set[str], change: Callable[[Package], None], packed: Path, tmp_path: Path
) -> None:
    package = take_apart(packed)
    change(package)
    results = verify_wheel(package.write(tmp_path / "x")).results
    failed = {result.name: result.details or result.summary for result in results if not result}
    assert set(failed) == refused_by, failed


@pytest.mark.parametrize("change", [one for _, one in TAMPERED.values()], ids=TAMPERED.keys())
def test_no_tampered_package_passes_with_a_key(
    change: Callable[[Package], None], packed: Path, tmp_path: Path
) -> None:
    package = take_apart(packed)
    change(package)
    (tmp_path / "ways").mkdir()
    for way, ids in deceive(tmp_path / "ways", packed, package.write(tmp_path / "x")):
        assert ids & REFUSED_BY[way], (way, ids)


def test_there_are_enough_of_them() -> None:
    assert len(TAMPERED) >= 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["info/index.json", "info/paths.json", "info/about.json"])
def test_no_metadata_of_a_package_gives_a_traceback(
    name: str, packed: Path, tmp_path: Path
) -> None:
    whole = take_apart(packed).info[name]
    for number, place in enumerate(places(json.loads(whole))):
        package = take_apart(packed)
        data = json.loads(whole)
        put(data, place, HOSTILE[number % len(HOSTILE)])
        package.info[name] = json.dumps(data).encode()
        assert verify_wheel(package.write(tmp_path / "x")).results
    for text in (b"", b"[" * 100_000, b"null", b"\xff", b"[]", b'{"paths": [{}]}'):
        package = take_apart(packed)
        package.info[name] = text
        assert verify_wheel(package.write(tmp_path / "x")).results


def test_the_package_that_they_were_made_of_passes(packed: Path, tmp_path: Path) -> None:
    package = take_apart(packed)
    package.list_paths()
    found = verify_wheel(package.write(tmp_path / "x"))
    assert found, [result for result in found.results if not result]
