"""Reads mutated binaries with every reader: each may raise only our own error, quickly.

    python -m tests.fuzz.readers [--cases 100000] [--seed 0]

Most cases are small valid files of some kind that were then damaged: bytes are flipped, cut out,
repeated or enlarged, sections are renamed, images get other kinds and targets, or many false
beginnings of GPU code are written. The others are bombs: packed zeros, thousands of members, nested
archives. The same seed gives the same cases. Exit status 1 at the first case that raises any other
error, takes longer than 2 s of CPU time or more than 1 GB.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import resource
import struct
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final

from flash_dist.toolkit.binaries import tar
from flash_dist.toolkit.binaries.symbols import SharedObject
from flash_dist.toolkit.errors import FatbinError, FetchError
from flash_dist.toolkit.gpucode.containers.registrations import CONTAINER_START
from flash_dist.toolkit.gpucode.inspection import LEVELS, Choice, inspect_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from flash_dist.toolkit.indexes.index import make_index
from tests.unit.made.dynamic_builder import make_shared
from tests.unit.made.fatbin_builder import (
    FOR_ONE_CHIP,
    LTO,
    PTX,
    SASS,
    TILE,
    Kernel,
    Part,
    container,
    cubin,
    elf,
    entry,
    library,
    ptx,
    stream,
    zstd,
)
from tests.unit.made.pe_builder import addresses, coff, pe

if TYPE_CHECKING:
    from collections.abc import Callable

SLOWEST: Final = 2.0  # seconds for one case
MOST_MEMORY: Final = 1 << 30  # bytes of the process
WRAPPER: Final = 0x466243B1
SPECIAL: Final = (0, 1, 0x7F, 0x80, 0xFF)
_SYMBOL_TABLES: Final = (
    *("needed", "rpath", "runpath"),
    *("undefined", "versions_needed", "versions_defined"),
)
TEXT_SIZE: Final = 7 << 20  # bytes of PTX in one image
NOISE: Final = random.Random(0).randbytes(4096)  # noqa: S311 - lets an image unpack to so much
PTX_NOISE: Final = b"// " + NOISE.hex().encode() + b"\n"
LARGE: Final = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)


def make_seeds() -> dict[str, bytes]:
    """Return a valid file of each kind, by suffix."""
    image = cubin(Kernel("alpha", externs=("vprintf",)), Kernel("_ZN1a4betaEv", smem=1024))
    images = container(
        entry(SASS, 80, image),
        entry(SASS, 90, image, suffix="a", codec="zstd"),
        entry(SASS, 75, image, codec="lz4"),
        entry(PTX, 80, ptx("alpha"), codec="zstd"),
        entry(LTO, 80, b"x" * 64),
    )
    shared = library(images, container(entry(SASS, 80, image)), wrappers=1)
    member = b"lib.o/          0           0     0     100644  " + b"%-10d`\n" % len(shared)
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/lib.so", shared)
    return {
        "library.so": shared,
        "dynamic.so": make_shared(defined=tuple(f"function_{number}" for number in range(9))),
        "library.dll": pe((".text", b"\xc3" * 16), (".nv_fatb", images)),
        "registered.dll": make_registered(images),
        "own.so": elf([Part(".data", b"\0" * 40 + images + images, flags=3)]),
        "bare.so": elf([Part(".rodata", image + images + zstd.compress(image) * 2, flags=2)]),
        "images.fatbin": images,
        "image.cubin": image,
        "stream.fatbin": container(entry(PTX, 80, ptx("alpha")), make_stream(image)),
        "stream.so": library(container(make_stream(image, "lz4"), make_stream(image)), wrappers=1),
        "tile.fatbin": container(
            entry(SASS, 120, make_suffixed(120), compat=FOR_ONE_CHIP),
            entry(TILE, 120, b"\x7fTileIR\0" + b"x" * 99, codec="zstd", isa=(3333, 0)),
        ),
        "suffixes.fatbin": container(
            entry(SASS, 90, make_suffixed(90)),
            entry(SASS, 100, make_suffixed(100, "-arch sm_100f "), suffix="f", codec="zstd"),
        ),
        "opaque.so": library(container(entry(LTO, 80, b"x" * 64), entry(LTO, 90, b"y" * 64))),
        "renamed.so": make_renamed(images),
        "stray.dll": make_registered(images, ".text"),
        "object.obj": coff((".nv_fatbin", images), ("__nv_relfatbin", images)),
        "archive.a": b"!<arch>\n" + member + shared,
        "pkg.whl": wheel.getvalue(),
        "rare.whl": pack({"a.so": shared, "b/tool": images}, zipfile.ZIP_LZMA),
        "rarer.whl": pack({"a.so": shared, "n\nb.so": shared}, zipfile.ZIP_BZIP2),
        "nested.whl": pack({"lib.a": b"!<arch>\n" + member + shared}, zipfile.ZIP_STORED),
        "pkg.conda": pack_conda({"lib/a.so": shared, "bin/tool": images, "l" * 150: b"x"}),
        "files.tar": pack_tar({"lib/a.so": shared, "l" * 150: b"x"}),
        "index.html": PAGE.encode(),
        "index.json": json.dumps(JSON_PAGE).encode(),
    }


def make_registered(images: bytes, name: str = ".data") -> bytes:
    """Return a Windows library with a registered container, and one without registration."""
    data = (name, b"\0" * 24 + images + images)
    (address,) = addresses(data)
    struct_ = struct.pack("<IIQQ", WRAPPER, 1, address + 24, 0)
    return pe((name, struct_ + data[1][24:]))


def make_renamed(images: bytes) -> bytes:
    """Return a library whose containers and structs are in renamed sections, and in no section."""
    segment = struct.pack("<IIQQQQQQ", 1, 6, 0, 0, 0, 1 << 20, 1 << 20, 4096)
    place = 64 + len(segment)
    structs = b"".join(struct.pack("<IIQQ", WRAPPER, n, place + n - 1, 0) for n in (1, 2, 3))
    parts = [
        Part("", segment),
        Part(".textgpu", images, flags=6),
        Part(".mydata", structs, flags=3),
        Part("", images, kind=0),
    ]
    return elf(parts, segments=1)


def make_suffixed(number: int, note: str = "") -> bytes:
    """Return a cubin that states its target itself, as nvcc 13 writes it."""
    parts = (Part(".nv.compat", FOR_ONE_CHIP), Part(".note.nv.tkinfo", note.encode()))
    data = bytearray(cubin(Kernel("alpha"), more=parts[:1] if not note else parts[1:]))
    data[8] = 8  # ABI version
    data[48:52] = struct.pack("<I", number << 8)
    return bytes(data)


def make_stream(image: bytes, codec: str = "zstd") -> bytes:
    """Return several images in one entry."""
    images = (
        entry(SASS, 80, image),
        entry(SASS, 90, image, suffix="a", identifier=b"code.cu"),
        entry(SASS, 100, make_suffixed(100), compat=FOR_ONE_CHIP),
    )
    return stream(*images, codec=codec)


def pack(members: dict[str, bytes], compression: int) -> bytes:
    """Return a zip archive."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return target.getvalue()


def pack_tar(members: dict[str, bytes]) -> bytes:
    """Return a tar archive, with extended headers for long names."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return target.getvalue()


def pack_conda(members: dict[str, bytes]) -> bytes:
    """Return a conda package."""
    return wrap_conda(pack_tar(members))


def wrap_conda(files: bytes) -> bytes:
    """Put a tar archive, which may be damaged, into a conda package."""
    packed = zstd.compress(files)
    return pack({"metadata.json": b"{}", "pkg-demo-1.tar.zst": packed}, zipfile.ZIP_STORED)


WHEEL_NAME: Final = "flash_dist-0.1.0+cu130.hopper-py3-none-manylinux_2_34_x86_64.whl"
PAGE: Final = f"""<!DOCTYPE html><html><head><base href="https://host/simple/"></head><body>
<a href="../files/{WHEEL_NAME}#sha256={"0" * 64}" data-requires-python="&gt;=3.10">a wheel</a>
<a href="flash_dist-0.2-py3-none-any.whl" data-yanked="">old</a>
<a href="linux-64/flash_dist-0.1-cuda130_hopper_0.conda">conda</a></body></html>"""
JSON_PAGE: Final = {
    "meta": {"api-version": "1.1"},
    "files": [
        {"filename": WHEEL_NAME, "url": WHEEL_NAME, "size": 1, "hashes": {"sha256": "0" * 64}}
    ],
    "projects": [{"name": "flash-dist"}],
}


def make_bombs() -> dict[str, bytes]:
    """Return small files that cost much work, by suffix: the budgets must stop each."""
    images = make_texts(NOISE + b" " * TEXT_SIZE, 12)
    many = container(*[entry(SASS, 80, b"")] * 6000)
    member = b"a.o/            0           0     0     100644  " + b"%-10d`\n"
    shared = library(container(entry(SASS, 80, cubin(Kernel("alpha")))))
    image = cubin(Kernel("alpha"))
    objects = b"!<arch>\n" + (member % len(shared) + shared) * 3000
    header = tarfile.TarInfo("lib/a.so").tobuf(tarfile.PAX_FORMAT)
    zeros = {f"{number}.so": bytes(30 << 20) for number in range(3)}
    sets = ".".join(f"py{number}" for number in range(900))
    return {
        "images.fatbin": images,
        **{f"{name}.fatbin": make_texts(PTX_NOISE + text) for name, text in make_ptx().items()},
        "many.fatbin": many,
        "objects.a": objects,
        **{
            f"{name}.so": elf([Part(section, piece * ((8 << 20) // len(piece)), flags=3)])
            for name, section, piece in (
                *(("magic", ".nv_fatbin", b"\x50\xed\x55\xba"),),
                *(("empty", ".nv_fatbin", CONTAINER_START + bytes(8)),),
                *(
                    (
                        "broken",
                        ".nv_fatbin",
                        CONTAINER_START + b"\x10".ljust(8, b"\0") + b"\xff" * 16,
                    ),
                ),
                *(("wrappers", ".nvFatBinSegment", struct.pack("<IIQQ", WRAPPER, 1, 120, 0)),),
                *(("structs", ".textgpu", struct.pack("<IIQQ", WRAPPER, 1, 120, 0)),),
            )
        },
        "streams.fatbin": container(*[stream(*[entry(SASS, 80, image)] * 50)] * 300),
        "one_stream.fatbin": container(stream(*[entry(SASS, 80, image + bytes(9999))] * 1000)),
        "starts.so": elf([Part(".data", CONTAINER_START * 500_000, flags=3)]),
        "frames.so": elf([Part(".data", zstd.compress(image)[:40] * 50_000, flags=3)]),
        "cubins.so": elf([Part(".data", image[:64] * 50_000, flags=3)]),
        "zeros.so": elf([Part(".data", zstd.compress(image + bytes(16 << 20)) * 12, flags=3)]),
        "chains.so": elf([Part(".data", make_chains(8000), flags=3)]),
        "structs.dll": pe(
            *((f"{number}", b"") for number in range(2000)),
            (".data", b"".join(struct.pack("<IIQQ", WRAPPER, 1, n, 0) for n in range(100_000))),
        ),
        "members.conda": wrap_conda(header * 60_000 + bytes(1024)),
        "zeros.conda": pack_conda(zeros),
        "endless.conda": wrap_conda(make_pax(b"10 path=a\nno line")),
        "deflate.whl": pack(zeros, zipfile.ZIP_DEFLATED),
        "bzip2.whl": pack(zeros, zipfile.ZIP_BZIP2),
        "lzma.whl": pack(zeros, zipfile.ZIP_LZMA),
        "names.whl": pack({f"{number}": b"" for number in range(20_000)}, zipfile.ZIP_STORED),
        "tags.html": f'<a href="https://h/flash_dist-1-{sets}-{sets}-{sets}.whl">x</a>'.encode(),
        "anchors.html": b'<a href="x.whl">' * 20_000,
        "deep.json": b'{"files":' + b"[" * 50_000,
    }


def make_texts(text: bytes, images: int = 8) -> bytes:
    """Return images of the same PTX; a small file may unpack at most eight."""
    return container(*[entry(PTX, 80, text, codec="zstd")] * images)


def make_ptx() -> dict[str, bytes]:
    """Return PTX texts that consist mostly of one construct, by its name."""
    bodies = {
        "braces": b"{}",
        "nested_braces": b"{{{}}}",
        "directives": b".a;",
        "statements": b"add.s32 %r1, %r2, %r3;\n",
        "semicolons": b";",
        "letters": b"l",
        "opcodes": b"xld.",
        "traps": b"trap ",
        "quotes": b'"" ',
        "open_quotes": b'"\n',
        "locations": b".loc 1 2 3\n",
        "locals": b".local ",
        "comments": b"//\n",
        "blocks": b"/**/",
        "open_blocks": b"/* ",
        "no_utf8": b"\xff",
    }
    texts = {
        name: b".entry a() {" + piece * (TEXT_SIZE // len(piece)) + b"}"
        for name, piece in bodies.items()
    }
    half = TEXT_SIZE // 2
    return texts | {
        "deep_braces": b".entry a() {" + b"{" * half + b"}" * half + b"}",
        "open_braces": b".entry a() " + b"{" * TEXT_SIZE,
        "open_block": b".entry a() {}/*" + b" " * TEXT_SIZE,
        "few_quotes": b".entry a() {" + (b'""' + b" " * 70) * (TEXT_SIZE // 72) + b"}",
        "entries": b".entry a() {}\n" * (TEXT_SIZE // 14),
        "entries_without_bodies": b".entry a;\n" * (TEXT_SIZE // 10),
        "entries_on_one_line": b".entry " * (TEXT_SIZE // 7),
        "visible": b".visible \n" * (TEXT_SIZE // 10) + b".entry a() {}",
    }


def make_chains(number: int) -> bytes:
    """Return containers, each of which begins in an image of the one before."""
    size = len(entry(SASS, 80, bytes(16)))
    heads = (CONTAINER_START + struct.pack("<Q", size * left) for left in range(number, 0, -1))
    images = (entry(SASS, 80, head) for head in heads)
    return CONTAINER_START + struct.pack("<Q", size * (number + 1)) + b"".join(images) + bytes(size)


def make_pax(record: bytes) -> bytes:
    """Return a tar archive with one extended header."""
    info = tarfile.TarInfo("pax")
    info.size, info.type = len(record), b"x"
    return info.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512) + bytes(1024)


def flip(data: bytearray, chance: random.Random) -> None:
    """Change some bytes."""
    for _ in range(chance.randint(1, 8)):
        place = chance.randrange(len(data))
        data[place] = chance.choice((*SPECIAL, chance.randrange(256)))


def enlarge(data: bytearray, chance: random.Random) -> None:
    """Insert a special number at a random place."""
    form = chance.choice(("<I", "<Q"))
    size = struct.calcsize(form)
    place = chance.randrange(max(1, len(data) - size)) // 4 * 4
    data[place : place + size] = struct.pack(form, chance.choice(LARGE) % 256**size)


def cut(data: bytearray, chance: random.Random) -> None:
    """Remove a part, mostly the end."""
    first = chance.randrange(len(data))
    del data[first : chance.choice((len(data), first + chance.randint(1, 64)))]


def repeat(data: bytearray, chance: random.Random) -> None:
    """Copy a part over another place."""
    size = chance.randint(1, 128)
    source, target = chance.randrange(len(data)), chance.randrange(len(data))
    data[target : target + size] = data[source : source + size]


def flood(data: bytearray, chance: random.Random) -> None:
    """Write the beginning of GPU code of some kind over a place, up to thousands of times."""
    piece = chance.choice(BEGINNINGS) * chance.choice((1, 1, 1, 3, 100, 5000))
    place = chance.randrange(len(data)) // 8 * 8
    data[place : place + len(piece) if chance.random() < 0.5 else place] = piece


def rename(data: bytearray, chance: random.Random) -> None:
    """Rename a section, at every place of its name, to another name of the same length."""
    old = chance.choice(NAMES)
    new = chance.choice(NAMES)[: len(old)].ljust(len(old), b"x")
    place = data.find(old)
    if place >= 0:
        data[place : place + len(old)] = new


def retarget(data: bytearray, chance: random.Random) -> None:
    """Change kind, suffix flags or number of an entry, or its whole header."""
    places = [
        place
        for place in range(0, len(data) - 64, 8)
        if data[place + 2 : place + 4] == b"\x01\x01" and not data[place + 1] & 0xFE
    ]
    if places:
        place = chance.choice(places)
        form, offset, values = chance.choice(FIELDS)
        struct.pack_into(form, data, place + offset, chance.choice(values))


BEGINNINGS: Final = (
    *(bytes.fromhex("50ed55ba"), CONTAINER_START, CONTAINER_START + bytes(8)),
    *(struct.pack("<IIQQ", WRAPPER, version, 120, 0) for version in (1, 2, 3)),
    *(b"\x7fELF\x02\x01\x01", b"\x28\xb5\x2f\xfd", entry(LTO, 80, b""), entry(TILE, 80, b"")),
)
NAMES: Final = (
    *(b".nv_fatbin", b"__nv_relfatbin", b".nvFatBinSegment", b".nv_fatb", b".textgpu", b".mydata"),
    *(b".data", b".rodata", b".text", b".nv.compat", b".note.nv.tkinfo", b".hip_fatbin"),
)
FIELDS: Final = (
    ("<H", 0, (1, 2, 8, 64, 128, 256)),
    ("<I", 20, (0, 8, 64, 72, 200)),  # offset of the options
    ("<I", 28, (0, 10, 80, 90, 100, 107, 120, 121, 255, 999)),
    ("<I", 40, (0, 0x11, 0x2011, 0x8011, 0x100011, 0x200011, 0x300011, 0x1000011, 0xFFFFFFFF)),
    ("<Q", 56, LARGE),
)
MUTATIONS: Final[tuple[Callable[[bytearray, random.Random], None], ...]] = (
    flip,
    flip,
    enlarge,
    cut,
    repeat,
    flood,
    rename,
    retarget,
)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Return the file with one to four mutations."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        if changed:
            chance.choice(MUTATIONS)(changed, chance)
    return bytes(changed)


def read_everything(path: Path) -> None:
    """Read a file at every level; our own error is a valid result."""
    if path.suffix in {".html", ".json"}:
        with contextlib.suppress(FetchError):
            make_index("fuzz", path.read_text("utf-8", "replace"), "https://host/simple/")
        return
    if path.suffix == ".tar":
        with contextlib.suppress(FatbinError), path.open("rb") as file:
            for member in tar.read_members(file):
                for _ in member.chunks():
                    pass
        return
    for choice in (*map(Choice, LEVELS), Choice(checked=True)):
        with contextlib.suppress(FatbinError):
            inspections, _ = inspect_libraries(open_libraries(path), choice)
            for inspection in inspections:
                inspection.to_json()
    with contextlib.suppress(FatbinError):
        read_symbols(SharedObject(path.read_bytes()))


def read_symbols(shared: SharedObject) -> None:
    """Read the dynamic linking data: each table, even after errors in others."""
    for name in _SYMBOL_TABLES:
        with contextlib.suppress(FatbinError):
            getattr(shared, name)
    for number in range(16):
        with contextlib.suppress(FatbinError):
            shared.defines(f"function_{number}")
    with contextlib.suppress(FatbinError):
        list(shared.defined())


def run_case(path: Path) -> tuple[str, float]:
    """Read one file; return the problem, if any, and the seconds.

    NOTE: The seconds are those of all levels together; a command reads one level.
    """
    start = time.process_time()  # CPU time: a busy machine is not a finding
    try:
        read_everything(path)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
        return f"{type(error).__name__}: {error}", 0.0
    seconds = time.process_time() - start
    return f"{seconds:.1f} s" if seconds > SLOWEST else "", seconds


def run_bomb(path: Path) -> tuple[str, float]:
    """Read one bomb as a command does, at each level; return the problem and the longest time."""
    worst = 0.0
    for choice in (*map(Choice, LEVELS), Choice(checked=True)):
        start = time.process_time()
        try:
            if path.suffix in {".html", ".json"}:
                read_everything(path)
            else:
                with contextlib.suppress(FatbinError):
                    inspect_libraries(open_libraries(path), choice)
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}", 0.0
        worst = max(worst, time.process_time() - start)
    return f"{worst:.1f} s" if worst > SLOWEST else "", worst


def run(cases: int, seed: int, *, bombs: bool = False) -> str:
    """Run the cases and return the problem of the first bad one; empty if there is none."""
    seeds = make_seeds()
    slowest = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name, data in make_bombs().items() if bombs else ():
            path = Path(folder) / name
            path.write_bytes(data)
            problem, seconds = run_bomb(path)
            path.unlink()
            if problem:
                return f"bomb {name} of {len(data):,} bytes: {problem}"
            slowest = max(slowest, seconds)
        for number in range(cases):
            chance = random.Random(f"{seed} {number}")  # noqa: S311 - no secret
            name = chance.choice(sorted(seeds))
            path = Path(folder) / name
            path.write_bytes(make_case(name, seeds[name], chance))
            problem, seconds = run_case(path)
            if problem:
                return f"case {number} of seed {seed} ({name}): {problem}"
            slowest = max(slowest, seconds)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    if memory > MOST_MEMORY:
        return f"{cases} cases of seed {seed} took {memory:,} bytes of memory"
    print(f"{cases} cases, slowest {slowest:.3f} s, {memory >> 20} MiB")  # noqa: T201 - a program
    return ""


def make_case(name: str, data: bytes, chance: random.Random) -> bytes:
    """Mutate a file, or often the packed contents if it is a conda package."""
    if name == "pkg.conda" and chance.random() < 0.7:
        return wrap_conda(mutate(pack_tar({"lib/a.so": data[:2000], "l" * 150: b"x"}), chance))
    return mutate(data, chance)


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(description="mutated binaries through every reader")
    parser.add_argument("--cases", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    problem = run(args.cases, args.seed, bombs=True)
    if problem:
        print(problem, file=sys.stderr)  # noqa: T201
    return int(bool(problem))


if __name__ == "__main__":
    sys.exit(main())
