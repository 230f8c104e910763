"""Limits on the work for a file: by its size, for any nesting, equal on every machine."""

from __future__ import annotations

import io
import random
import zipfile
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.budget import LIMITS, Budget, Limit, one_command
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode.inspection import Choice, inspect_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.binaries.budget import Work

MIB = 1 << 20
# The largest counts seen in one file, and the size of that file. The files are torch 2.11 and
# 2.7, NCCL 2.27 and 2.30, cuBLASLt 13, cuDNN 9 (libraries), and torch's wheels.
SEEN: dict[Work, tuple[int, int]] = {
    "bytes": (7_000 * MIB, 420 * MIB),
    "searched": (1_600 * MIB, 420 * MIB),
    "members": (12_500, 420 * MIB),
    "images": (5_900, 300 * MIB),
    "symbols": (7_900_000, 420 * MIB),
    "kernels": (147_201, 420 * MIB),
}


@pytest.mark.parametrize("work", LIMITS)
def test_the_largest_files_seen_pass_with_room(work: Work) -> None:
    most, size = SEEN[work]
    Budget(size).spend(work, 3 * most)


def test_a_limit_says_what_it_is_of_and_what_to_do() -> None:
    budget = Budget(100)
    budget.spend("kernels", budget.left("kernels"))
    with pytest.raises(LimitError, match=r"more than 20001 kernels.* 100 bytes") as caught:
        budget.spend("kernels")
    assert "unpack" in (caught.value.hint or "")
    budget = Budget(100, "some.whl")
    with pytest.raises(LimitError, match=r"cannot read `some\.whl`: .* 50000 members \("):
        budget.spend("members", 50001)


def read(path: Path, level: str = "kernels") -> list[str]:
    """Return the reasons for unread parts."""
    try:
        _, unread = inspect_libraries(open_libraries(path), Choice(level))  # type: ignore[arg-type]
    except FatbinError as error:
        return [error.message]
    return [one.error.message for one in unread]


def nest(inner: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in inner.items():
            archive.writestr(name, data)
    return target.getvalue()


def archive(*members: bytes) -> bytes:
    """Return an archive of object files."""
    head = b"a.o/            0           0     0     100644  "
    parts = (head + b"%-10d`\n" % len(one) + one + b"\n" * (len(one) % 2) for one in members)
    return b"!<arch>\n" + b"".join(parts)


def test_all_files_of_a_command_share_what_is_there_beside_their_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    allow(monkeypatch, "kernels", 5)
    with one_command():
        Budget(100).spend("kernels", 3)
        second = Budget(200)
        with pytest.raises(LimitError, match=r"more than 2 kernels.* 200 bytes .*before") as caught:
            second.spend("kernels", 3)
        assert "alone" in (caught.value.hint or "")
        Budget(300).spend("kernels", 2)
        assert Budget(400).left("kernels") == 0
    Budget(500).spend("kernels", 5)


def test_no_file_uses_up_the_budget_of_another_files_bytes() -> None:
    with one_command():
        small, large = Budget(0), Budget(1 << 20)
        small.spend("symbols", small.left("symbols"))
        assert large.left("symbols") == (1 << 20) // 8
        large.spend("symbols", 1000)
        assert small.left("symbols") == 0


@pytest.mark.parametrize("command", ["inspect", "audit", "verify"])
def test_a_hundred_small_files_that_ask_for_everything_are_as_much_work_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Each file unpacks to a thousand times its size; all files together get the budget of one."""
    worked: Counter[str] = Counter()
    spend = Budget.spend

    def count(self: Budget, work: Work, amount: int = 1) -> None:
        spend(self, work, amount)
        worked[work] += amount

    monkeypatch.setattr(Budget, "spend", count)
    monkeypatch.setitem(LIMITS, "bytes", Limit("bytes", 4 * MIB, 64, 1 << 40))
    paths = [tmp_path / f"a{number}-1-py3-none-any.whl" for number in range(20)]
    size = 0
    for path in paths:
        packed = library(container(entry(PTX, 80, bytes(MIB))))
        record = f"lib.so,sha256=AAAA,{len(packed)}\n".encode()
        path.write_bytes(nest({"lib.so": packed, "a-1.dist-info/RECORD": record}))
        size += path.stat().st_size
    options = {"inspect": ["--level", "kernels"]}.get(command, [])
    main([command, *options, *map(str, paths)])
    assert 3 * MIB < worked["bytes"] <= 4 * MIB + 3 * 64 * size


def test_nested_files_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two libraries, each in an archive in one wheel: their images count together."""
    images = container(*[entry(SASS, 80, cubin(Kernel("alpha")))] * 3)
    path = tmp_path / "pkg.whl"
    path.write_bytes(nest({f"{n}.a": archive(library(images)) for n in range(2)}))
    assert read(path) == []
    allow(monkeypatch, "images", 5)
    assert "more than 5 images of GPU code" in read(path)[0]
    allow(monkeypatch, "images", 6)
    assert read(path) == []


@pytest.mark.parametrize("level", ["kernels", "coverage"])
def test_an_image_beyond_the_limit_ends_the_file_at_every_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: str
) -> None:
    path = tmp_path / "lib.so"
    image = entry(PTX, 80, ptx("alpha", "beta"), codec="zstd")
    path.write_bytes(library(container(image, image)))
    allow(monkeypatch, "kernels", 3)
    assert "more than 3 kernels" in read(path, level)[0]


def test_a_small_file_cannot_ask_for_much(tmp_path: Path) -> None:
    """A file of 64 KB has many images, each of which unpacks to over 1000 times its size."""
    text = random.Random(0).randbytes(4096) + b" " * (7 * MIB)  # noqa: S311 - no secret
    images = container(*[entry(PTX, 80, text, codec="zstd")] * 16)
    path = tmp_path / "bomb.fatbin"
    path.write_bytes(images)
    assert len(images) < 80_000
    (said,) = read(path)
    assert "bytes to unpack" in said
    assert f"{len(images)} bytes" in said


def test_a_long_name_counts_as_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "image.cubin"
    path.write_bytes(cubin(Kernel("k" * 6400)))
    assert read(path) == []
    allow(monkeypatch, "symbols", 100)
    assert "more than 100 sections and symbols" in read(path)[0]
