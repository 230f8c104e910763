"""The table of channels, and adding one with one module and one row."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import json
import sys
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import nox.registry
import pytest

from ci.install_tests.install import PHASES, Stage, try_channel
from ci.install_tests.results import Result
from flash_dist.toolkit.indexes.install_commands import Command
from flash_dist.toolkit.make import shared_sessions
from flash_dist.toolkit.make.building import sdist
from flash_dist.toolkit.make.conda import channel as conda
from flash_dist.toolkit.make.project import ROOT, load_project
from flash_dist.toolkit.make.release import (
    hub,
    index,
    manifest,
    pypi,
    toolkit_wheel,
    variants,
    zipapp,
)
from flash_dist.toolkit.make.release.channels import CHANNELS, Row, released
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, find_artefacts
from flash_dist.toolkit.make.wheels.channel import Channel, Published
from tests.unit.made.whole_wheel import NAME, write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path
    from types import ModuleType

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

# mypy checks that each implements the protocol
MODULES: list[Channel] = [sdist, conda, index, pypi, zipapp, toolkit_wheel, variants, hub]
URL = "https://example.org/x/"


class Parcels:
    """A test channel: a file with the SHA-256 of each wheel."""

    def __init__(self, dist: Path) -> None:
        self.dist = dist

    def main(self) -> int:
        for one in find_artefacts(self.dist):
            path = self._path(self.dist, one)
            path.parent.mkdir(exist_ok=True)
            path.write_text(one.sha256)
        return 0

    def _path(self, dist: Path, one: Artefact) -> Path:
        return dist / "parcel" / f"{one.set_name}.parcel"

    def check(self, dist: Path, artefacts: Sequence[Artefact]) -> list[Published]:
        made = {one: self._path(dist, one) for one in artefacts}
        found = {one: path for one, path in made.items() if path.is_file()}
        if any(path.read_text() != one.sha256 for one, path in found.items()):
            message = "a parcel is not of its wheel"
            raise ArtefactError(message, hint="`nox -s parcel` packs it anew")
        return [Published(path, one, {"stamps": 2}) for one, path in found.items()]

    def commands(self, address: str) -> list[Command]:
        return [Command("post", f"post fetch {address}")]


class ParcelInstallTest:
    """An install test whose only result is NOT RUN."""

    def results(self, artefacts: Sequence[Artefact], work: Path) -> Iterator[Result]:
        yield Result("post", f"{len(artefacts)} parcels", "NOT RUN", work.name)


ROW = Row(
    "parcel",
    "parcels",
    "Pack parcels.",
    groups=("runtime",),
    linked=True,
    partial=("--partial",),
    install_test="parcel_install_test",
)


@pytest.fixture
def parcels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Parcels:
    """Add a row for a channel, and a wheel to publish."""
    write_whole_wheel(tmp_path / "hopper")
    made = Parcels(tmp_path)
    monkeypatch.setitem(sys.modules, "parcels", made)
    monkeypatch.setitem(sys.modules, "parcel_install_test", ParcelInstallTest())
    monkeypatch.setitem(CHANNELS, ROW.name, ROW)
    return made


def call(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", [module.__name__, *words])
    code: int = module.main()
    return code


def write_index(dist: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return call(index, monkeypatch, "--dist", str(dist), "--partial", "--url", URL)


def write_manifest(dist: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    return call(manifest, monkeypatch, "--dist", str(dist), "--no-commit")


def test_every_row_has_its_module() -> None:
    loaded = [row.load() for row in CHANNELS.values()]
    assert loaded == MODULES, "MODULES names them for mypy, in the order of the table"
    assert list(CHANNELS) == [row.name for row in CHANNELS.values()]
    names = ["sdist", "conda", "index", "pypi", "zipapp", "toolkit"]
    assert [row.name for row in released()] == names, "by hand"
    assert list(PHASES) == ["pip", "uv", "conda", "torch"]


def test_a_new_channel_is_on_the_page_and_in_the_index(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parcels.main()
    assert write_index(parcels.dist, monkeypatch) == 0
    assert f"parcel  {URL}parcel\n" in capsys.readouterr().out
    page = (parcels.dist / "index" / "index.html").read_text()
    assert '<dt>Parcel</dt><dd><a href="parcel/hopper.parcel">hopper.parcel</a></dd>' in page
    assert f"post fetch {URL}parcel/hopper.parcel" in page
    copied = parcels.dist / "index" / "parcel" / "hopper.parcel"
    assert copied.read_text() == hashlib.sha256(wheel_of(parcels).read_bytes()).hexdigest()


def wheel_of(parcels: Parcels) -> Path:
    return parcels.dist / "hopper" / NAME


def test_a_new_channel_is_in_the_manifest_with_sum_and_statement(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels.main()
    sources = parcels.dist / f"flash_dist-{load_project().version}.tar.gz"
    sources.write_bytes(b"sources")
    assert write_manifest(parcels.dist, monkeypatch) == 0
    entries = json.loads((parcels.dist / "manifest.json").read_text())["artefacts"]
    assert [one["kind"] for one in entries] == ["wheel", "parcel", "sdist"]
    wheel, parcel, _ = entries
    assert (parcel["path"], parcel["wheel"]) == ("parcel/hopper.parcel", NAME)
    assert (parcel["stamps"], parcel["archs"], parcel["size"]) == (2, wheel["archs"], 64)
    digest = hashlib.sha256(wheel["sha256"].encode()).hexdigest()
    assert parcel["sha256"] == digest
    assert f"{digest}  parcel/hopper.parcel\n" in (parcels.dist / "SHA256SUMS").read_text()
    path = parcels.dist / "provenance" / "hopper.parcel.intoto.json"
    statement = json.loads(path.read_text())
    build = statement["predicate"]["buildDefinition"]
    assert statement["subject"][0]["digest"] == {"sha256": digest}
    assert build["buildType"] == "urn:flash-dist:parcel:v1"
    assert build["resolvedDependencies"][0]["name"] == NAME


def test_a_new_channel_is_checked_before_it_is_published(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parcels.main()
    (parcels.dist / "parcel" / "hopper.parcel").write_text("of another wheel")
    for write in (write_index, write_manifest):
        assert write(parcels.dist, monkeypatch) == 1
        assert capsys.readouterr().err.startswith("error: a parcel is not of its wheel\n\nhint: ")
    assert not (parcels.dist / "index").exists()
    assert not (parcels.dist / "manifest.json").exists()


def test_a_channel_that_was_not_written_is_reported_and_left_out(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write_index(parcels.dist, monkeypatch) == 0
    assert "parcel  none: `nox -s parcel` makes a channel\n" in capsys.readouterr().out
    assert write_manifest(parcels.dist, monkeypatch) == 0
    entries = json.loads((parcels.dist / "manifest.json").read_text())["artefacts"]
    assert [one["kind"] for one in entries] == ["wheel"]
    assert not (parcels.dist / "index" / "parcel").exists()


def test_a_channel_that_is_no_part_of_a_release_is_in_no_manifest(
    parcels: Parcels, monkeypatch: pytest.MonkeyPatch
) -> None:
    parcels.main()
    row = Row(ROW.name, ROW.module, ROW.summary, groups=(), released=False)
    monkeypatch.setitem(CHANNELS, row.name, row)
    assert write_manifest(parcels.dist, monkeypatch) == 0
    assert "parcel" not in (parcels.dist / "SHA256SUMS").read_text()


class Recorder:
    """Stub of the session that nox passes to a function."""

    def __init__(self, *posargs: str) -> None:
        self.posargs = posargs
        self.said: list[tuple[str, ...]] = []

    def install(self, *words: str) -> None:
        self.said.append(("install", *words))

    def run(self, *words: str) -> None:
        self.said.append(("run", *words))


def load_noxfile(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, dict[str, Any]]:
    """Run the noxfile as nox does; return it, and its sessions by name."""
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    sessions: OrderedDict[str, Any] = OrderedDict()
    monkeypatch.setattr(nox.registry, "_REGISTRY", sessions)
    monkeypatch.delitem(sys.modules, shared_sessions.__name__, raising=False)  # registers again
    spec = importlib.util.spec_from_file_location("noxfile_of_this_test", ROOT / "noxfile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module, sessions


@pytest.mark.usefixtures("parcels")
def test_a_new_channel_has_a_session_and_its_place_in_a_release(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, sessions = load_noxfile(monkeypatch)
    assert module.RELEASED[-3:] == ("parcel", "manifest", "install_test")
    assert sessions["parcel"].func.__doc__ == "Pack parcels."
    recorder = Recorder("--all")
    sessions["parcel"].func(recorder)
    install, run = recorder.said
    assert install[:2] == ("install", "--require-hashes")
    assert install[-1].endswith("runtime.txt")
    assert run == ("run", "python", "-m", "parcels", "--all")


def test_the_sessions_of_the_channels_are_those_of_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, sessions = load_noxfile(monkeypatch)
    names = [row.name for row in released()]
    assert ("fingerprint_check", *names, "manifest", "install_test") == module.RELEASED
    for row in CHANNELS.values():
        assert sessions[row.name].func.__doc__ == row.summary
    assert module.args_of("index", ["--no-build", "--url", URL]) == ["--url", URL]
    assert module.args_of("conda", ["--url", URL]) == []
    assert module.args_of("manifest", ["--url", URL]) == []


def test_a_new_channel_is_a_phase_of_install_test(parcels: Parcels, tmp_path: Path) -> None:
    stage = Stage(find_artefacts(parcels.dist), URL, tmp_path)
    (result,) = try_channel(ROW, stage)
    assert (result.client, result.what, result.outcome) == ("post", "1 parcels", "NOT RUN")


OWN = (
    "flash_dist/toolkit/make/conda/",
    "ci/install_tests/bare_debian.py",
    "ci/install_tests/conda",
    "flash_dist/toolkit/make/release/channels.py",
    "flash_dist/toolkit/indexes/channels.py",
)
ASKING = ("ci", "flash_dist/toolkit/make", "flash_dist/toolkit/indexes", "noxfile.py")


def find_modules() -> list[Path]:
    """List the modules that read the table of channels, except conda's own."""
    paths = [path for place in ASKING for path in (ROOT / place, *(ROOT / place).rglob("*.py"))]
    names = {path.relative_to(ROOT).as_posix(): path for path in paths if path.suffix == ".py"}
    return [path for name, path in sorted(names.items()) if not name.startswith(OWN)]


def find_words(tree: ast.AST) -> Iterator[str]:
    """Yield names and texts of the code, without docstrings and comments."""
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant() as docstring):
                docstring.value = ""
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.alias(name=name):
                yield name
            case ast.ImportFrom(module=str(name)) | ast.keyword(arg=str(name)):
                yield name
            case ast.Constant(value=str(text)):
                yield text


def test_words_are_those_of_the_code() -> None:
    text = 'def conda():\n    """No word."""\n    return condas["word"].of(word="last")  # conda'
    found = list(find_words(ast.parse(text)))
    assert sorted(filter(None, found)) == ["conda", "condas", "last", "of", "word", "word"]


def test_no_other_module_names_conda() -> None:
    # A table may not use any channel's folder in dist/ as the name of a set
    modules = [path for path in find_modules() if path.parts[-2:] != ("declared", "sets.py")]
    assert len(modules) > 50
    named = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in modules
        for word in find_words(ast.parse(path.read_text()))
        if "conda" in word.lower()
    ]
    assert named == []
