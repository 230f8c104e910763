"""Packages of channels besides PyPI: conda packages by name and folder, and a new channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.indexes.channels import READERS, CondaPackage, parse_conda, parse_package
from flash_dist.toolkit.indexes.index import read_index
from flash_dist.toolkit.indexes.pages import Link
from tests.unit.made.wheels import write_wheel

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.made.command import Cli

HOPPER = Version("0.1.0+cu130.hopper")


def test_a_conda_package_lies_in_a_channel() -> None:
    name = "flash-dist-0.1.0-cuda130_hopper_0.conda"
    found = parse_conda(Link(f"https://example.org/chan/linux-64/{name}"))
    assert found is not None
    assert (found.channel, found.spec) == (
        "https://example.org/chan",
        "flash-dist=0.1.0=cuda130_hopper_0",
    )
    assert parse_conda(Link(f"https://example.org/files/{name}")) is None


@pytest.mark.parametrize(
    ("package", "holds"),
    [
        (("0.1.0", "cuda130_hopper_1"), True),
        (("0.1.1", "cuda130_hopper_1"), False),
        (("0.1.0", "cuda124_hopper_1"), False),
        (("0.1.0", "cuda130_hopper2_1"), False),
    ],
    ids=["the same", "version", "toolkit", "set"],
)
def test_a_conda_package_is_of_one_wheel(package: tuple[str, str], *, holds: bool) -> None:
    one = CondaPackage("flash-dist", *package, "/chan nel")
    assert one.holds(HOPPER, "13.0", "hopper") is holds
    assert one.line.startswith("conda install -c '/chan nel' -c conda-forge \"flash-dist=0.1.")


@dataclass(frozen=True)
class Parcel:
    """Product of a test channel for a wheel: `hopper.parcel`."""

    label: str
    name: str = "flash-dist"
    tool: str = "post"

    @property
    def line(self) -> str:
        return f"post fetch {self.label}"

    def holds(self, version: Version, toolkit: str, label: str) -> bool:
        return (version.public, toolkit, label) == ("0.1.0", "13.0", self.label)


def test_a_new_channel_is_a_class_and_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    hopper = next(one for one in published_sets() if one.name == "hopper")
    write_wheel(tmp_path, hopper)
    for name in ("hopper.parcel", "all.parcel"):
        (tmp_path / name).touch()
    words = ["select", "--gpu", "9.0", "--driver", "580", "--index", str(tmp_path)]
    assert "post" not in cli(*words).out
    assert parse_package(Link("https://example.org/hopper.parcel")) is None
    monkeypatch.setitem(READERS, ".parcel", lambda link: Parcel(link.file_name[:-7]))
    found = {one.line for one in read_index(str(tmp_path)).packages}
    assert found == {"post fetch hopper", "post fetch all"}
    assert cli(*words).out.splitlines()[-1] == "post    post fetch hopper"
