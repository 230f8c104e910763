"""Bodies of kernels: length and behaviour, from SASS words and PTX statements."""

from __future__ import annotations

import contextlib
import random
import struct
import time

import pytest

from flash_dist.toolkit.errors import FatbinError, LimitError
from flash_dist.toolkit.gpucode.cubin import STEP_COST, read_cubin_kernels, read_ptx_kernels
from flash_dist.toolkit.gpucode.sass import Body, read_cubin_bodies, read_ptx_bodies
from flash_dist.toolkit.targets.archs import Arch
from tests.unit.made.budgets import allow
from tests.unit.made.fatbin_builder import Kernel, cubin, ptx

SM_61, SM_90 = Arch(6, 1), Arch(9, 0)
MOV, EXIT, BRA, NOP = 0x7A02, 0x794D, 0x7947, 0x7918  # opcodes with predicate PT
TRAP, LDG, STG, CALL, UTMALDG = 0x795C, 0x7981, 0x7986, 0x7343, 0x75B4


def words(*opcodes: int) -> bytes:
    return b"".join(struct.pack("<HHIQ", opcode, 7, 0, 0xFC0) for opcode in opcodes)


def body(*opcodes: int, externs: tuple[str, ...] = ()) -> Body:
    (found,) = read_cubin_bodies(cubin(Kernel("k", code=words(*opcodes), externs=externs)), SM_90)
    return found


@pytest.mark.parametrize(
    ("opcodes", "length"),
    [
        pytest.param((), 0, id="nothing"),
        pytest.param((NOP, NOP), 0, id="padding-only"),
        pytest.param((EXIT, BRA), 1, id="branch-to-itself"),
        pytest.param((MOV, EXIT, BRA, NOP, NOP, NOP), 2, id="branch-and-padding"),
        pytest.param((MOV, NOP, BRA, EXIT, BRA), 4, id="inside-they-count"),
        pytest.param((EXIT, BRA, BRA), 2, id="only-one-branch-is-padding"),
        pytest.param((0x094D, 0x0918), 1, id="predicate-is-no-part-of-the-opcode"),
    ],
)
def test_padding_does_not_count(opcodes: tuple[int, ...], length: int) -> None:
    assert body(*opcodes).instructions == length


def test_words_and_externs_show_the_work_of_a_body() -> None:
    assert body(MOV, EXIT) == Body("k", 2)
    assert body(TRAP, EXIT) == Body("k", 2, traps=True)
    assert body(LDG) == body(STG) == body(UTMALDG) == Body("k", 1, uses_memory=True)
    assert body(CALL, externs=("vprintf",)) == Body("k", 1, calls=True, prints=True)
    assert body(CALL, externs=("__assertfail",)) == Body("k", 1, calls=True, asserts=True)
    assert body(CALL, externs=("other", "vprintf")) == Body("k", 1, calls=True, prints=True)
    assert body(CALL, externs=("my_vprintf",)) == Body("k", 1, calls=True)


def test_long_bodies_are_not_looked_at() -> None:
    assert body(*[TRAP] * 64).traps
    assert body(*[NOP] * 64).instructions == 0
    assert body(*[TRAP] * 65) == Body("k", 65)


def test_old_code_tells_its_length_only() -> None:
    data = cubin(Kernel("k", code=words(TRAP, EXIT), externs=("vprintf",)))
    assert read_cubin_bodies(data, SM_61) == (Body("k", 2, counted=False),)


def test_kernels_are_told_from_device_functions_and_kept_in_order() -> None:
    data = cubin(
        Kernel("two", code=words(EXIT)),
        Kernel("helper", code=words(EXIT), entry=False),
        Kernel("one", code=words(MOV, EXIT)),
    )
    assert read_cubin_bodies(data, SM_90) == (Body("two", 1), Body("one", 2))


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x7fELF" * 40, id="no-elf"),
        pytest.param(cubin(Kernel("k", code=b"x" * 24)), id="half-a-word"),
    ],
)
def test_a_broken_image_is_an_error(data: bytes) -> None:
    with pytest.raises(FatbinError):
        read_cubin_bodies(data, SM_90)


def test_a_symbol_that_claims_more_than_its_section_is_an_error() -> None:
    data = cubin(Kernel("k", code=words(EXIT)))
    symbol = struct.pack("<QQ", 0, 16)
    assert data.count(symbol) == 1
    for claim in (struct.pack("<QQ", 0, 32), struct.pack("<QQ", 8, 16), struct.pack("<QQ", 99, 16)):
        with pytest.raises(FatbinError, match="code of `k`"):
            read_cubin_bodies(data.replace(symbol, claim), SM_90)


def test_an_extern_that_is_no_symbol_is_an_error() -> None:
    data = cubin(Kernel("k", code=words(EXIT), externs=("vprintf",)))
    extern = struct.pack("<BBHI", 4, 0x0F, 4, 2)
    assert data.count(extern) == 1
    with pytest.raises(FatbinError, match="no symbol 4294967295"):
        read_cubin_bodies(data.replace(extern, extern[:4] + b"\xff" * 4), SM_90)


@pytest.mark.parametrize("count", [2, 3])
def test_kernels_of_one_image_are_bounded(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    allow(monkeypatch, "kernels", 2)
    names = [f"k{number}" for number in range(count)]
    image, text = cubin(*(Kernel(name) for name in names)), ptx(*names)
    for read in (
        lambda: read_cubin_bodies(image, SM_90),
        lambda: read_cubin_kernels(image, SM_90),
        lambda: read_ptx_bodies(text),
        lambda: read_ptx_kernels(text, SM_90),
    ):
        refused = pytest.raises(FatbinError, match="more than 2 kernels")
        with refused if count > 2 else contextlib.nullcontext():
            assert len(read()) == count


def test_no_damage_raises_anything_but_our_own_error() -> None:
    whole = cubin(
        Kernel("k", code=words(MOV, TRAP, EXIT), externs=("vprintf", "__assertfail")),
        Kernel("other", code=words(*[STG] * 300), max_threads=(128, 1, 1)),
    )
    chance = random.Random(4)  # noqa: S311  (not for secrets)
    for _ in range(1500):
        damaged = bytearray(whole[: chance.randrange(len(whole) // 2, len(whole) + 1)])
        for _ in range(chance.randrange(6)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        with contextlib.suppress(FatbinError):
            read_cubin_bodies(bytes(damaged), SM_90)


# --- PTX ------------------------------------------------------------------------------------------

HEAD = ".version 9.0\n.target sm_80\n.address_size 64\n"
CALL_VPRINTF = """\
.extern .func (.param .b32 func_retval0) vprintf ( .param .b64 a, .param .b64 b ) ;
.global .align 1 .b8 $str[3] = {72, 105, 0};
.visible .entry k(.param .u64 k_param_0) .maxntid 128, 1, 1 {
.reg .b64 %rd<3>;
.loc 1 2 3
mov.u64 %rd1, $str;
{ // callseq 0, 0
.param .b64 param0;
st.param.b64 [param0+0], %rd1;
call.uni (retval0), vprintf, (param0);
}
.pragma "nounroll";
ret;
}
"""


def ptx_body(text: str) -> Body:
    (found,) = read_ptx_bodies((HEAD + text).encode() + b"\0")
    return found


def test_statements_count_and_directives_do_not() -> None:
    assert ptx_body(CALL_VPRINTF) == Body("k", 4, prints=True, calls=True)


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        pytest.param("ret;", Body("k", 1), id="empty"),
        pytest.param("trap;\nret;", Body("k", 2, traps=True), id="trap"),
        pytest.param("call.uni __assertfail, (p);", Body("k", 1, asserts=True, calls=True), id="a"),
        pytest.param("ld.param.u64 %a, [p];\nst.local.u32 [b], 1;", Body("k", 2), id="no-memory"),
        pytest.param("st.global.u32 [a], 1;", Body("k", 1, uses_memory=True), id="store"),
        pytest.param("@%p1 ld.v2.f32 {%a, %b}, [c];", Body("k", 1, uses_memory=True), id="vector"),
        pytest.param("// trap;\n/* vprintf { */ ret;", Body("k", 1), id="comments"),
        pytest.param("$L_1:\nbra $L_1;\n.loc 1 2 3\nret;", Body("k", 2), id="lines-and-labels"),
        pytest.param("trap_it: mov.u32 %trap, 1;", Body("k", 1), id="trap-inside-a-name"),
        pytest.param("nop xtrap; trap ;", Body("k", 2, traps=True), id="trap-after-such-a-name"),
        pytest.param("call_it: mov.u32 %call, x.call2;", Body("k", 1, calls=True), id="call"),
        pytest.param("call_it: mov.u32 xcall, call2;", Body("k", 1), id="call-inside-a-name"),
        pytest.param("ldu.global.u32 %a, [b];", Body("k", 1, uses_memory=True), id="load-uniform"),
        pytest.param("xld.u32 a; ldmatrix.x4 b; ld.const.u32 c;", Body("k", 3), id="no-load"),
        pytest.param("multimem.red.u32 a;", Body("k", 1, uses_memory=True), id="opcode-after-dot"),
        pytest.param("st.param.u32 a; st.u32 b;", Body("k", 2, uses_memory=True), id="second"),
        pytest.param("/* { trap;\n .entry x() { */ ret;", Body("k", 1), id="lines-of-comment"),
        pytest.param("/*/ trap; */ ret; /**/ ret; //*\nret;", Body("k", 3), id="short-comments"),
        pytest.param('.pragma "/* } // \\"; ret; /* " */ ret;', Body("k", 2), id="strings"),
        pytest.param(
            '// "\nret; // "\n.loc 1 "\n"trap;\nret;', Body("k", 3, traps=True), id="quote"
        ),
        pytest.param("ld.local.u32 a; .local .b8 b; .loc\t1 } 2\nret;", Body("k", 2), id="local"),
        pytest.param("{ .a; } {{.b;} {c;} .d {e;} ;}", Body("k", 3), id="directives"),
        pytest.param("\1loc ret;\1.a; \1; \xff;", Body("k", 4), id="odd-bytes"),
    ],
)
def test_ptx_tells_what_it_does(statements: str, expected: Body) -> None:
    assert ptx_body(f".entry k()\n{{\n{statements}\n}}\n") == expected


def test_entries_follow_each_other_and_declarations_have_no_body() -> None:
    text = ".extern .entry other ( .param .u64 p ) ;\n.entry k()\n{\nret;\n}\n"
    assert read_ptx_bodies(text.encode() + ptx("a", "b")) == (
        Body("k", 1),
        Body("a", 1),
        Body("b", 1),
    )
    assert read_ptx_bodies(b"") == ()
    assert read_ptx_bodies(b".entry k()") == ()


def test_ptx_that_ends_within_a_body_is_an_error() -> None:
    with pytest.raises(FatbinError, match="PTX of `k` ends within its body"):
        read_ptx_bodies(b".entry k()\n{ { ret; }\n")


def test_flags_are_of_short_bodies_only() -> None:
    stores = "st.global.u32 [a], 1;\n"
    assert ptx_body(f".entry k() {{{stores * 64}}}") == Body("k", 64, uses_memory=True)
    assert ptx_body(f".entry k() {{{stores * 65}}}") == Body("k", 65)


@pytest.mark.parametrize("before", range(4088, 4100))
def test_a_body_of_any_length_ends_at_its_own_brace(before: int) -> None:
    body = " " * before + "{{{ a; }}} {}{ b; }" + " " * 4096 + "c; {{}}" * 9
    text = f".entry k() {{{body}}}\n{{ }} }} .entry no()\n.entry l() {{ d; }}"
    assert read_ptx_bodies(text.encode()) == (Body("k", 11), Body("l", 1))
    with pytest.raises(FatbinError, match="PTX of `k` ends within its body"):
        read_ptx_bodies(f".entry k() {{{body}".encode())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param(".visible .entry a() {}\n\t.weak\n.entry\nb() {}", "ab", id="forms"),
        pytest.param(".visible\r\n.entry a() {}\r\n.entry b() {}", "ab", id="line-ends"),
        pytest.param(".entry a() {} .entry x() {}\n.entry b() {}", "ab", id="two-on-a-line"),
        pytest.param("x .entry x() {}\n.func .entry y() {}\n.entry a() {}", "a", id="not-first"),
        pytest.param(".entry (x) {}\n.entry a() {}\n.entry", "a", id="no-name"),
        pytest.param(".entry \N{LATIN SMALL LETTER E WITH ACUTE}() {}", "\xe9", id="utf-8"),
        pytest.param(".entry a() {}\n.entry b() {}\n.entry a() {}", "ab", id="twice"),
    ],
)
def test_entries_begin_a_line(text: str, names: str) -> None:
    assert [body.name for body in read_ptx_bodies(text.encode())] == list(names)
    assert [kernel.name for kernel in read_ptx_kernels(text.encode(), SM_90)] == list(names)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{ a; } " * 9, id="braces-and-semicolons"),
        pytest.param("{{{}}}" * 9, id="nested-braces"),
        pytest.param('""' * 9, id="strings"),
        pytest.param(".loc 1 2 3\n" * 9, id="lines"),
        pytest.param("/**/" * 9, id="comments"),
        pytest.param("xtrap " * 9, id="words"),
        pytest.param("}\n.entry x() {" * 9, id="entries"),
    ],
)
def test_work_on_ptx_is_counted(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    allow(monkeypatch, "searched", 10 * STEP_COST)
    read_ptx_bodies(b".entry k() {" + b"a, " * 1000 + b"}")
    with pytest.raises(LimitError, match="more than 1500 bytes to search"):
        read_ptx_bodies(f".entry k() {{{text * 9}}}".encode())


def test_ptx_without_entries_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    allow(monkeypatch, "searched", 0)
    assert read_ptx_bodies(b'// "" {} {} ;' * 99) == ()
    assert read_ptx_kernels(b'// "" {} {} ;' * 99, SM_90) == ()


@pytest.mark.parametrize(
    "nonsense",
    [
        b"/*" * 500_000,
        b".visible \n" * 100_000,
        b".entry x\n" * 100_000,
        b".entry x\n" * 100_000 + b";",
        b'"' * 500_000,
        b"\n.loc" * 200_000,
        b".entry k()\n{" + b"{ ." * 200_000 + b"}" * 200_001,
        b".entry k()\n{" + b"; ." * 200_000 + b"}",
        b".entry k()\n{" + b"{}" * 500_000 + b"}",
        b".entry k()\n{" + b"xld. " * 200_000 + b"}",
        b".entry k()\n{" + b"\xff" * 1_000_000 + b"}",
        b".entry k() {}\n/* " + b"* " * 500_000,
        b".entry " * 200_000,
    ],
    ids=[
        *("comments", "visible", "entries", "declared", "quotes", "lines", "braces", "directives"),
        *("pairs", "opcodes", "no-utf-8", "open-comment", "one-line"),
    ],
)
def test_hostile_ptx_takes_no_time(nonsense: bytes) -> None:
    started = time.process_time()
    read_ptx_bodies(nonsense)
    assert time.process_time() - started < 2
