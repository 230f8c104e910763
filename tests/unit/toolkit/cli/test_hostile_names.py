"""All subcommands escape names that imitate our lines or steer a terminal."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.cli import SUBCOMMANDS, main
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.whole_wheel import NAME, make_files, write_whole_wheel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FORGED = "x\n[ok]    forged      all is well\r\x1b[2J\u202e\u2028[fail]"
CODE = library(container(entry(SASS, 80, cubin(Kernel(FORGED)))))


def write_library(folder: Path) -> Path:
    path = folder / f"{FORGED}.so"
    path.write_bytes(CODE)
    return path


def write_foreign(folder: Path) -> Path:
    path = folder / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"demo/{FORGED}.so"), CODE)
    return path


def write_own(folder: Path) -> Path:
    return write_whole_wheel(folder, {**make_files(), f"flash_dist/{FORGED}.py": b""})


def write_absent(folder: Path) -> Path:
    return folder / f"{FORGED}.whl"


def write_page(folder: Path) -> Path:
    page = folder / "page.html"
    wheel = NAME.replace("hopper", "x%0A[ok]%20forged%1b")
    page.write_text(f'<a href="https://example.org/{wheel}">{FORGED}</a>')
    return page


PLACES: list[Callable[[Path], Path]] = [write_library, write_foreign, write_own, write_absent]
CALLS: dict[str, tuple[str, ...]] = {
    "inspect": ("inspect", "{}"),
    "inspect kernels": ("inspect", "--level", "kernels", "--all", "{}"),
    "inspect coverage": ("inspect", "--level", "coverage", "{}"),
    "inspect sizes": ("inspect", "--level", "sizes", "{}"),
    "inspect diff": ("inspect", "--diff", "{}", "{}"),
    "doctor": ("doctor", "--wheel", "{}", "--gpu", "9.0"),
    "audit": ("audit", "--require", "9.0", "{}"),
    "audit quiet": ("audit", "-q", "--require", "9.0", "{}"),
    "audit github": ("audit", "--format", "github", "--require", "9.0", "{}"),
    "audit kernels": ("audit", "--kernels", "{}"),
    "audit baseline": ("audit", "--baseline", "{}", "{}"),
    "verify": ("verify", "{}"),
    "verify manifest": ("verify", "--manifest", "{}", "{}"),
    "select": ("select", "--gpu", "9.0", "--index", "{}"),
    "bench": ("bench", "--from-json", "{}"),
}


@pytest.mark.parametrize("words", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("place", PLACES, ids=lambda one: one.__name__)
def test_no_name_prints_a_line_of_ours(
    words: tuple[str, ...],
    place: Callable[[Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = place(tmp_path)
    main([word.format(path) for word in words])
    judge(capsys)


def judge(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = capsys.readouterr()
    for line in (out + err).split("\n"):
        assert all(char.isprintable() for char in line), line
        assert not line.lstrip().startswith(("[ok]    forged", "[ok] forged", "[fail]\\u")), line


def test_explained_and_unknown_names_are_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for text in (FORGED, f"libcudart.so.{FORGED}: cannot open shared object file"):
        main(["explain", text])
        judge(capsys)


def test_links_of_a_page_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["select", "--gpu", "9.0", "--index", str(write_page(tmp_path))])
    judge(capsys)
    main(["doctor", "--wheel", str(write_page(tmp_path)), "--gpu", "9.0"])
    judge(capsys)


def test_names_in_a_manifest_are_on_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "manifest.json"
    one = {"file": FORGED, "sha256": "0" * 64, "size": 1}
    path.write_text(json.dumps({"version": 1, "artefacts": [one]}))
    main(["verify", "--manifest", str(path), str(write_own(tmp_path))])
    judge(capsys)


def test_the_subcommands_that_read_files_are_all_called() -> None:
    called = {words[0] for words in CALLS.values()} | {"explain"}
    assert set(SUBCOMMANDS) - called == {"selftest", "fleet"}, "these read GPUs and no names"
