"""Files that inspect and audit cannot read: a sentence that names them, and a fix."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.contents import MANIFEST
from flash_dist.toolkit.builds.manifest import FILE_NAME
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.names import BINDING, KERNELS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.made.command import Cli

LIBRARY = library(container(entry(SASS, 80, cubin(Kernel("alpha")))), wrappers=1)


def complaint(cli: Cli, *argv: str) -> tuple[str, str]:
    """Run a failing subcommand; return its sentence and its hint."""
    out, err = cli(*argv, status=2)
    assert out == ""
    said, empty, hint, end = err.split("\n")
    assert said.startswith("error: ")
    assert hint.startswith("hint: ")
    assert (empty, end) == ("", "")
    return said[7:], hint[6:]


@pytest.mark.parametrize("suffix", [".so", ".whl"])
@pytest.mark.parametrize("command", ["inspect", "audit"])
def test_absent_and_empty_files_are_named(
    command: str, suffix: str, tmp_path: Path, cli: Cli
) -> None:
    path = tmp_path / f"one{suffix}"
    said, hint = complaint(cli, command, str(path))
    assert said == f"cannot read `{path}`: No such file or directory"
    assert "`nox -s build_wheels`" in hint
    path.write_bytes(b"")
    said, hint = complaint(cli, command, str(path))
    assert said == f"cannot read `{path}`: it is empty"
    assert hint == "build, copy or download it again"


@pytest.mark.parametrize(
    ("data", "reason", "step"),
    [
        (b"#!/bin/sh\n" * 50, "fat binary", ".fatbin"),
        (LIBRARY[:40], "truncated", "build, copy or download it again"),
        (LIBRARY[:-40], "outside the file", "build, copy or download it again"),
        (b"\x7fELF\x01" + LIBRARY[5:], "64-bit little-endian", "64-bit Linux"),
    ],
    ids=["text", "header", "cut", "32-bit"],
)
def test_a_member_that_is_no_library_is_named_with_its_wheel(
    data: bytes, reason: str, step: str, tmp_path: Path, cli: Cli
) -> None:
    path = tmp_path / "bad.so"
    path.write_bytes(data)
    said, hint = complaint(cli, "inspect", str(path))
    assert said.startswith(f"cannot read `{path}`: ")
    assert reason in said
    assert step in hint
    wheel = tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/bad.so", data)
    said, hint = complaint(cli, "inspect", str(wheel))
    assert said.startswith(f"cannot read `pkg/bad.so` in `{wheel}`: ")
    assert reason in said
    assert step in hint


def test_an_empty_library_in_a_wheel_is_called_empty(tmp_path: Path, cli: Cli) -> None:
    wheel = tmp_path / "pkg.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/bad.so", b"")
    said, _ = complaint(cli, "inspect", str(wheel))
    assert said == f"cannot read `pkg/bad.so` in `{wheel}`: it is empty"


@pytest.mark.parametrize("command", ["inspect", "audit"])
def test_a_file_that_is_no_wheel_is_reported(command: str, tmp_path: Path, cli: Cli) -> None:
    whole = tmp_path / "whole.whl"
    with zipfile.ZipFile(whole, "w") as archive:
        archive.writestr("pkg/lib.so", LIBRARY)
    cut = tmp_path / "cut.whl"
    cut.write_bytes(whole.read_bytes()[:-40])
    said, hint = complaint(cli, command, str(cut))
    assert said.startswith(f"cannot read `{cut}`: ")
    assert "not a wheel" in said
    assert hint == "build, copy or download it again"


@pytest.mark.parametrize("manifest", [b"{", b"[]", b'{"version": 1}', b"\xff"], ids=repr)
def test_a_bad_manifest_is_named_with_its_wheel(manifest: bytes, tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "ours.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MANIFEST, manifest)
        archive.writestr(KERNELS, LIBRARY)
        archive.writestr(BINDING, LIBRARY)
    said, _ = complaint(cli, "audit", str(path))
    assert f"`{path}`" in said
    assert FILE_NAME in said
