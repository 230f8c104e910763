"""Verdicts on kernels, from made-up bodies of every length; tests/readers compiles real ones."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import FatbinError
from flash_dist.toolkit.gpucode import coverage
from flash_dist.toolkit.gpucode.coverage import Coverage, Verdict, find_coverage
from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from tests.unit.made.fatbin_builder import LTO, PTX, SASS, Kernel, container, cubin, entry, library

if TYPE_CHECKING:
    from pathlib import Path

MOV, EXIT, TRAP, STG, CALL = 0x7A02, 0x794D, 0x795C, 0x7986, 0x7343
PRINTS, ASSERTS = ("vprintf",), ("__assertfail",)


def kernel(name: str, length: int, *special: int, externs: tuple[str, ...] = ()) -> Kernel:
    """Make a kernel of this many instructions; `special` are some of them."""
    opcodes = (*special, *[MOV] * (length - 1 - len(special)), EXIT)
    code = b"".join(struct.pack("<H14x", opcode) for opcode in opcodes)
    return Kernel(name, code=code, externs=externs)


def sass(number: int, *kernels: Kernel) -> bytes:
    return entry(SASS, number, cubin(*kernels))


def ptx(number: int, **bodies: str) -> bytes:
    """Write PTX of these bodies; the body `40` stands for 40 statements that store."""
    text = ".version 9.0\n"
    for name, body in bodies.items():
        inner = "st.global.u32 [a], 1;\n" * int(body) if body.isdigit() else body
        text += f".visible .entry {name}()\n{{\n{inner}}}\n"
    return entry(PTX, number, text.encode())


def cover(tmp_path: Path, *containers: bytes, relocatable: bytes | None = None) -> Coverage:
    path = tmp_path / "lib.so"
    path.write_bytes(library(b"".join(containers), relocatable))
    with open_fatbin(path) as fatbin:
        return find_coverage(fatbin)


def verdicts(found: Coverage, name: str = "k") -> dict[str, Verdict]:
    (row,) = (row for row in found.rows if row.name == name)
    return row.verdicts


# --- Rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("short", "big", "expected"),
    [
        pytest.param(kernel("k", 2), 17, "stub:empty", id="empty"),
        pytest.param(kernel("k", 4), 17, "stub:empty", id="empty-at-its-longest"),
        pytest.param(kernel("k", 5), 17, "real", id="longer-than-empty"),
        pytest.param(kernel("k", 2), 16, "real", id="empty-beside-another-small-one"),
        pytest.param(kernel("k", 2), 2, "real", id="all-are-empty"),
        pytest.param(kernel("k", 3, CALL), 40, "real", id="calls-something"),
        pytest.param(kernel("k", 20, externs=PRINTS), 76, "stub:printf", id="printf"),
        pytest.param(kernel("k", 20, externs=PRINTS), 75, "real", id="printf-not-much-shorter"),
        pytest.param(kernel("k", 48, externs=PRINTS), 999, "stub:printf", id="printf-16-times"),
        pytest.param(kernel("k", 48, externs=PRINTS), 700, "stub:printf", id="printf-longest"),
        pytest.param(kernel("k", 49, externs=PRINTS), 700, "real", id="printf-too-long"),
        pytest.param(kernel("k", 20, externs=ASSERTS), 100, "stub:assert", id="assert"),
        pytest.param(kernel("k", 3, TRAP), 100, "stub:trap", id="trap"),
        pytest.param(kernel("k", 3, TRAP), 17, "stub:trap", id="trap-beside-a-short-one"),
        pytest.param(kernel("k", 9, TRAP, externs=PRINTS), 100, "stub:printf", id="printf-trap"),
        pytest.param(kernel("k", 6), 96, "stub:tiny", id="tiny"),
        pytest.param(kernel("k", 6), 95, "real", id="not-quite-tiny"),
    ],
)
def test_a_body_is_judged_by_the_longest_of_its_kernel(
    tmp_path: Path, short: Kernel, big: int, expected: Verdict
) -> None:
    found = cover(tmp_path, container(sass(75, short), sass(80, kernel("k", big))))
    assert verdicts(found) == {"sm_75": expected, "sm_80": "real"}


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        pytest.param(kernel("k", 2), "real", id="empty-may-be-meant"),
        pytest.param(kernel("k", 6), "real", id="tiny-may-be-meant"),
        pytest.param(kernel("k", 48, externs=PRINTS), "stub:printf", id="printf"),
        pytest.param(kernel("k", 49, externs=PRINTS), "real", id="printf-too-long"),
        pytest.param(kernel("k", 20, externs=ASSERTS), "stub:assert", id="assert"),
        pytest.param(kernel("k", 20, STG, externs=ASSERTS), "real", id="assert-and-a-store"),
        pytest.param(kernel("k", 3, TRAP), "stub:trap", id="trap"),
    ],
)
def test_a_single_target_shows_complaints_only(
    tmp_path: Path, alone: Kernel, expected: Verdict
) -> None:
    assert verdicts(cover(tmp_path, container(sass(90, alone)))) == {"sm_90": expected}


def test_old_code_is_judged_by_its_size_only(tmp_path: Path) -> None:
    short, tiny = kernel("a", 3, TRAP, externs=PRINTS), kernel("b", 3, TRAP, externs=PRINTS)
    others = sass(80, kernel("a", 47), kernel("b", 48))
    found = cover(tmp_path, container(sass(61, short, tiny), others))
    assert verdicts(found, "a") == {"sm_61": "real", "sm_80": "real"}
    assert verdicts(found, "b") == {"sm_61": "stub:tiny", "sm_80": "real"}


def test_ptx_is_judged_by_other_ptx(tmp_path: Path) -> None:
    found = cover(
        tmp_path,
        container(
            sass(90, *(kernel(name, 5000) for name in "abcd")),
            ptx(75, a="ret;", b="call.uni vprintf, (p);", c="20", d="trap;"),
            ptx(90, a="40", b="40", c="40", d="40"),
        ),
    )
    expected = ("stub:empty", "stub:printf", "real", "stub:trap")
    for name, verdict in zip("abcd", expected, strict=True):
        row = {"compute_75": verdict, "sm_90": "real", "compute_90": "real"}
        assert verdicts(found, name) == row


def test_ptx_alone_is_empty_only_beside_much_sass(tmp_path: Path) -> None:
    bodies = {"a": "ret;", "b": "ret;", "c": "call f;", "d": "call vprintf;", "e": "5"}
    sizes = {"a": 49, "b": 48, "c": 49, "d": 49, "e": 5000}
    found = cover(
        tmp_path,
        container(sass(90, *(kernel(n, size) for n, size in sizes.items())), ptx(90, **bodies)),
    )
    expected = ("stub:empty", "real", "real", "stub:printf", "real")
    for name, verdict in zip(bodies, expected, strict=True):
        assert verdicts(found, name) == {"sm_90": "real", "compute_90": verdict}


def test_a_kernel_is_missing_beside_others_of_its_container_only(tmp_path: Path) -> None:
    found = cover(
        tmp_path,
        container(sass(75, kernel("a", 9)), sass(90, kernel("a", 9), kernel("k", 9))),
        container(sass(80, kernel("b", 9))),
    )
    assert verdicts(found, "a") == {"sm_75": "real", "sm_90": "real"}
    assert verdicts(found, "k") == {"sm_75": "missing", "sm_90": "real"}
    assert verdicts(found, "b") == {"sm_80": "real"}
    assert [(row.name, row.container) for row in found.rows] == [("a", 0), ("k", 0), ("b", 1)]


def test_an_image_that_cannot_be_read_is_unknown_and_a_warning(tmp_path: Path) -> None:
    found = cover(
        tmp_path,
        container(
            entry(SASS, 75, b"\x7fELF" * 40),
            sass(80, kernel("k", 100)),
            ptx(90, k="ret;").replace(b"ret;", b"ret{"),
        ),
        container(entry(SASS, 86, b"")),
    )
    assert verdicts(found) == {"sm_75": "unknown", "sm_80": "real", "compute_90": "unknown"}
    assert found.targets == ("sm_75", "sm_80", "sm_86", "compute_90")
    assert len(found.warnings) == 3
    assert "sm_75 image at offset" in found.warnings[0]


def test_linked_code_counts_and_relocatable_code_for_its_ptx(tmp_path: Path) -> None:
    twice = container(sass(75, kernel("k", 2)), ptx(80, k="9"), entry(LTO, 80, b"x" * 8))
    linked = container(sass(75, kernel("k", 50)), sass(80, kernel("k", 60)))
    found = cover(tmp_path, linked, relocatable=twice)
    assert sorted(map(str, (row.verdicts for row in found.rows))) == [
        "{'compute_80': 'real'}",
        "{'sm_75': 'real', 'sm_80': 'real'}",
    ]


def test_the_longer_of_two_bodies_for_one_target_counts(tmp_path: Path) -> None:
    twice = container(*(sass(75, kernel("k", size)) for size in (2, 50, 2)))
    assert verdicts(cover(tmp_path, twice)) == {"sm_75": "real"}


def test_a_library_without_code_has_an_empty_table(tmp_path: Path) -> None:
    found = cover(tmp_path, container())
    assert (found.targets, found.rows, found.counts, found.warnings) == ((), (), {}, ())


def test_a_table_becomes_plain_data(tmp_path: Path) -> None:
    found = cover(tmp_path, container(sass(75, kernel("k", 2)), sass(80, kernel("k", 60))))
    document = json.loads(json.dumps(found.to_json()))
    assert document == {
        "path": str(tmp_path / "lib.so"),
        "targets": ["sm_75", "sm_80"],
        "counts": {"sm_75": {"stub:empty": 1}, "sm_80": {"real": 1}},
        "kernels": [
            {"name": "k", "container": 0, "verdicts": {"sm_75": "stub:empty", "sm_80": "real"}}
        ],
        "warnings": [],
    }


def test_tables_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MAX_CELLS", 3)
    names = [kernel(name, 9) for name in "abc"]
    assert len(cover(tmp_path, container(sass(75, *names))).rows) == 3
    with pytest.raises(FatbinError, match="more than 3 kernel"):
        cover(tmp_path, container(sass(75, *names), sass(80)))


def test_warnings_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "MAX_WARNINGS", 2)
    broken = [entry(SASS, number, b"") for number in (75, 80, 86)]
    assert len(cover(tmp_path, container(*broken), container(*broken)).warnings) == 2
