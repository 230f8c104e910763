"""Arguments of auditwheel, and the CPU for which it repairs a wheel."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flash_dist.toolkit.make.wheels.repair import EXCLUDED, main, repair_words

WHEEL, FOLDER = Path("raw.whl"), Path("repaired")


def test_external_libraries_are_not_packed_and_one_tag_is_left() -> None:
    words = repair_words(WHEEL, FOLDER, "x86_64")
    assert {words[at + 1] for at, word in enumerate(words) if word == "--exclude"} == set(EXCLUDED)
    assert "--only-plat" in words
    assert words[words.index("--zip-compression-level") + 1] == "9", "the smallest files"
    assert words[-3:] == ["-w", "repaired", "raw.whl"]


@pytest.mark.parametrize(
    ("plat", "tag"), [(None, "auto"), ("manylinux_2_28", "manylinux_2_28_aarch64")]
)
def test_the_oldest_true_tag_is_taken_unless_one_is_named(plat: str | None, tag: str) -> None:
    words = repair_words(WHEEL, FOLDER, "aarch64", plat)
    assert words[words.index("--plat") + 1] == tag


def test_auditwheel_runs_as_on_the_cpu_that_the_wheel_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, str | None, list[str]]] = []
    module = ModuleType("auditwheel.main")
    module.__dict__["main"] = lambda: asked.append(
        (platform.machine(), os.environ.get("AUDITWHEEL_PLAT"), sys.argv[:2])
    )
    for name in ("auditwheel", "auditwheel.main"):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setenv("FLASH_DIST_MACHINE", "aarch64")
    monkeypatch.setenv("AUDITWHEEL_PLAT", "manylinux_2_28_x86_64")  # set in manylinux images
    assert main(["--plat", "manylinux_2_28", "raw.whl", "repaired"]) == 0
    assert asked == [("aarch64", None, ["auditwheel", "repair"])]
