"""Include rules of csrc: kernel families include only core, and core includes only ptx."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from ci.places import INCLUDES

if TYPE_CHECKING:
    from collections.abc import Iterator

CSRC: Final = Path(__file__).parents[3] / "csrc"
HEADERS: Final = (".h", ".cuh")
INCLUDE: Final = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)

# Folders without kernel families: shared code, and host code.
SHARED: Final = ("ptx", "core")
HOST: Final = ("host", "binding", "debug")
# Generated headers, which include none of ours.
COMMON: Final = (
    *(
        f"{name}plans.h"
        for name in (
            *("", "decode_", "dropout_", "fwd_pair_", "bwd_halves_"),
            *("fwd_bias_", "bwd_bias_", "max_logit_"),
        )
    ),
    "wgmma_shapes.h",
)


def families(csrc: Path) -> list[str]:
    """Return the folders that hold a kernel family each."""
    return sorted(
        path.name
        for path in csrc.iterdir()
        if path.name not in SHARED + HOST and any(h.suffix in HEADERS for h in path.rglob("*"))
    )


def allowed(csrc: Path) -> dict[str, tuple[str, ...]]:
    """Return what each folder of device code may include, beside COMMON."""
    return {
        "ptx": ("ptx", "native"),  # wrappers of instructions depend on no other folder
        "core": ("core", "ptx", "native"),
        **{family: (family, "core", "ptx", "native") for family in families(csrc)},
    }


def broken_rules(csrc: Path) -> Iterator[str]:
    """Yield a line for each include that breaks a rule."""
    for folder, others in allowed(csrc).items():
        for path, name in includes(csrc, csrc / folder):
            if name.split("/")[0] not in others and Path(name).name not in COMMON:
                yield f"{path} includes {name}"
    for path, name in includes(csrc, csrc):
        if path.split("/")[0] not in allowed(csrc) and name.split("/")[0] in families(csrc):
            yield f"{path} includes {name}"


def includes(csrc: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield file and included name for each `#include "..."` below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in (*HEADERS, ".cpp", ".cu"):
            for name in INCLUDE.findall(path.read_text(encoding="utf-8")):
                yield path.relative_to(csrc).as_posix(), name


def unused(csrc: Path, roots: set[str]) -> list[str]:
    """Return the device headers that no file includes and that are not roots."""
    named = {name for _, name in includes(csrc, csrc)} | roots
    headers = (
        path.relative_to(csrc).as_posix()
        for folder in allowed(csrc)
        for path in (csrc / folder).rglob("*")
        if path.suffix in HEADERS
    )
    return sorted(header for header in headers if header not in named)


def test_no_family_includes_another_nor_core_a_family_nor_ptx_core() -> None:
    assert list(broken_rules(CSRC)) == []


def test_the_families_are_found() -> None:
    assert {"mma", "f32", "sm90"} <= set(families(CSRC))


def test_every_include_names_a_file() -> None:
    missing = [
        f"{path} includes {name}"
        for folder in allowed(CSRC)
        for path, name in includes(CSRC, CSRC / folder)
        if name not in COMMON and not any((folder / name).is_file() for folder in INCLUDES)
    ]
    assert missing == []


def test_every_device_header_is_included_or_a_kernel() -> None:
    kernels = set(re.findall(r'header = "([^"]+)"', (CSRC / "kernels.toml").read_text("utf-8")))
    assert unused(CSRC, kernels) == []


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("f32/bwd/dkdv.h", "mma/bwd/config.h"),
        ("sm90/fwd/kernel.cuh", "mma/fragments.cuh"),
        ("core/blocks.cuh", "mma/fwd/work.cuh"),
        ("core/tile.cuh", "dispatch.h"),
        ("ptx/mma.cuh", "core/tile.cuh"),
        ("dispatch.cpp", "mma/fwd/kernel.cuh"),
    ],
)
def test_a_crossing_is_named(tmp_path: Path, path: str, name: str) -> None:
    write(tmp_path, "mma/fragments.cuh", '#include "core/tile.cuh"\n#include "ptx/mma.cuh"\n')
    write(tmp_path, "core/tile.cuh", '#include "core/params.h"\n')
    write(tmp_path, path, f'#pragma once\n\n#include "{name}"\n')
    assert list(broken_rules(tmp_path)) == [f"{path} includes {name}"]


def write(root: Path, path: str, text: str) -> None:
    """Write a file and its parent folders."""
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text, encoding="utf-8")
