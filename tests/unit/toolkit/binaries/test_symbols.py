"""Dynamic linking data of libraries: real ones, stripped ones, damaged ones."""

from __future__ import annotations

import random
import struct
import time
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.binaries.segments import Platform, is_shared, read_platform
from flash_dist.toolkit.binaries.symbols import (
    SharedObject,
    Undefined,
    Version,
    hash_name,
    open_shared,
)
from flash_dist.toolkit.errors import FatbinError
from tests.unit.made.dynamic_builder import make_shared
from tests.unit.made.library_builder import Lab, call, define, needs_gcc

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs_gcc

WEAK = "void maybe(void) __attribute__((weak));\nvoid tries(void) { if (maybe) maybe(); }\n"


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def without_sections(path: Path) -> SharedObject:
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, 40, 0)
    struct.pack_into("<HHH", data, 58, 0, 0, 0)
    return SharedObject(bytes(data))


def test_needs_and_exports_of_a_library_are_read(lab: Lab) -> None:
    provider = lab.build("libprovider.so.1", define("provided"), version="PROVIDER_1.0")
    path = lab.build(
        "libuser.so", call("provided", "missing") + WEAK, "-Wl,-rpath,$ORIGIN:/opt/lib",
        "-Wl,--enable-new-dtags", needs=(provider,),
    )  # fmt: skip
    shared = open_shared(path)
    version = Version("libprovider.so.1", "PROVIDER_1.0")
    assert shared.needed == ("libprovider.so.1",)
    assert (shared.runpath, shared.rpath) == (("$ORIGIN", "/opt/lib"), ())
    assert set(shared.undefined) == {
        Undefined("provided", version=version),
        Undefined("missing"),
        Undefined("maybe", weak=True),
    }
    assert shared.versions_needed == (version,)
    assert sorted(shared.defined()) == ["calls", "tries"]
    assert "PROVIDER_1.0" in open_shared(provider).versions_defined


def test_an_old_search_path_is_told_from_a_new_one(lab: Lab) -> None:
    path = lab.build("old.so", define("f"), "-Wl,-rpath,/opt", "-Wl,--disable-new-dtags")
    assert (open_shared(path).rpath, open_shared(path).runpath) == (("/opt",), ())


@pytest.mark.parametrize("style", ["gnu", "sysv", "both"])
def test_each_name_that_is_defined_is_found_and_no_other(lab: Lab, style: str) -> None:
    names = [f"function_{number}" for number in range(500)]
    path = lab.build("many.so", define(*names) + call("elsewhere"), f"-Wl,--hash-style={style}")
    shared = open_shared(path)
    assert all(shared.defines(name) for name in names)
    assert not any(shared.defines(f"function_{number}") for number in range(500, 1500))
    assert not shared.defines("elsewhere")
    assert set(shared.defined()) == {*names, "calls"}


def test_the_hash_is_that_of_binutils() -> None:
    assert (hash_name(b""), hash_name(b"printf")) == (0x1505, 0x156B2BB8)


def test_a_library_stripped_of_its_sections_tells_the_same(lab: Lab) -> None:
    path = lab.build("lib.so", define("given") + call("wanted"))
    shared = without_sections(path)
    assert shared.undefined == open_shared(path).undefined == (Undefined("wanted"),)
    assert shared.defines("given")


def test_a_library_that_offers_nothing_has_undefined_symbols_all_the_same(lab: Lab) -> None:
    source = "void wanted(void);\nstatic void f(void) { wanted(); }\nstatic void (*p)(void) = f;\n"
    hidden = source + '__attribute__((visibility("hidden"))) void *q(void) { return p; }\n'
    shared = open_shared(lab.build("lib.so", hidden))
    assert shared.undefined == (Undefined("wanted"),)
    assert not list(shared.defined())


def test_the_systems_c_library_is_read() -> None:
    with open("/proc/self/maps", encoding="utf-8") as maps:  # noqa: PTH123
        found = next((line.split()[-1] for line in maps if "/libc.so.6" in line), "")
    if not found:
        pytest.skip("this system has no glibc")
    libc = open_shared(found)
    assert libc.defines("malloc")
    assert not libc.defines("mallocate")
    assert "GLIBC_2.17" in libc.versions_defined


@pytest.mark.parametrize(
    ("kind", "order", "machine", "platform"),
    [
        (2, 1, b"\x3e\0", Platform(62, 64)),
        (2, 1, b"\xb7\0", Platform(183, 64)),
        (1, 1, b"\x03\0", Platform(3, 32)),
        (2, 2, b"\0\x16", Platform(22, 64, little=False)),
    ],
    ids=["x86_64", "aarch64", "x86", "s390x"],
)
def test_the_platform_is_read_of_any_elf_file(
    kind: int, order: int, machine: bytes, platform: Platform
) -> None:
    header = b"\x7fELF" + bytes([kind, order, 1]) + bytes(9) + b"\x03\0" + machine + bytes(44)
    assert read_platform(header) == platform
    if platform.bits == 32 or not platform.little:
        with pytest.raises(FatbinError, match="64-bit little-endian"):
            SharedObject(header)


def test_a_file_that_is_not_loaded_is_no_shared_library() -> None:
    assert not is_shared(b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x01\0" + bytes(46))  # an object
    assert not is_shared(b"MZ" + bytes(100))
    assert not is_shared(b"\x7fELF")
    with pytest.raises(FatbinError, match="not an ELF file"):
        read_platform(b"hello")


def test_a_library_made_by_hand_tells_what_was_put_in() -> None:
    shared = SharedObject(make_shared(defined=("provided", "function_7"), undefined="wanted"))
    version = Version("libneeded.so.1", "NEEDED_1")
    assert shared.undefined == (Undefined("wanted", version=version),)
    assert shared.versions_needed == (version,)
    assert shared.versions_defined == {"OWN_1"}
    assert (shared.needed, shared.runpath) == (("libneeded.so.1",), ("$ORIGIN/libs", "/opt/lib"))
    assert all(map(shared.defines, ("provided", "function_7")))
    assert list(shared.defined()) == ["provided", "function_7"]


def read_all(data: bytes) -> None:
    shared = SharedObject(data)
    _ = (shared.needed, shared.rpath, shared.runpath, shared.undefined)
    _ = (shared.versions_needed, shared.versions_defined, list(shared.defined()))
    shared.defines("provided")
    shared.defines("function_7")


def test_damage_is_our_own_error_and_takes_no_time(lab: Lab) -> None:
    provider = lab.build("libprovider.so", define("provided"), version="PROVIDER_1.0")
    names = [f"function_{number}" for number in range(20)]
    source = define(*names) + call("provided") + WEAK
    path = lab.build("lib.so", source, needs=(provider,), version="USER_2.0")
    whole = path.read_bytes()
    read_all(whole)
    dice = random.Random(7)  # noqa: S311 - damage, no secret
    started = time.process_time()
    refused = 0
    for _ in range(400):
        data = bytearray(whole[: dice.randrange(64, len(whole))] if dice.random() < 0.2 else whole)
        for _ in range(dice.randrange(1, 9)):
            place = dice.randrange(min(len(data), 4096))
            data[place] = dice.choice((0, 1, 0x7F, 0xFF, dice.randrange(256)))
        try:
            read_all(bytes(data))
        except FatbinError:
            refused += 1
    assert refused > 20
    assert time.process_time() - started < 20


def endless_table() -> bytes:
    """Write an ELF file with a hash table whose only chain has zeros up to the end of the file."""
    table, dynamic = 0x200, 0x100
    header = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 64, 0, 0, 64, 56, 2, 64, 0, 0)
    size = table + 400_000
    load = struct.pack("<IIQQQQQQ", 1, 4, 0, 0, 0, size, size, 4096)
    found = struct.pack("<IIQQQQQQ", 2, 4, dynamic, dynamic, 0, 64, 64, 8)
    start = b"\x7fELF\x02\x01\x01" + bytes(9) + header + load + found
    tags = struct.pack("<qQqQqQ", 0x6FFFFEF5, table, 6, 0, 0, 0)
    hashes = struct.pack("<IIIIQI", 1, 1, 1, 0, 2**64 - 1, 1)
    return (start.ljust(dynamic, b"\0") + tags).ljust(table, b"\0") + hashes + bytes(400_000 - 28)


def test_a_chain_without_an_end_is_refused() -> None:
    shared = SharedObject(endless_table())
    with pytest.raises(FatbinError, match="share a bucket of its hash table"):
        shared.defines("anything")
    with pytest.raises(FatbinError, match="more than 16384 names"):
        list(shared.defined())
