"""Targets, arch sets, devices and drivers; the compatibility table is written by hand."""

from __future__ import annotations

import pytest

from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.targets.archs import (
    KNOWN_ARCHS,
    NAMED_LISTS,
    TOOLKIT_ARCHS,
    Arch,
    ArchSet,
    require_supported,
    unsupported,
)
from flash_dist.toolkit.targets.compatibility import (
    JitPolicy,
    Origin,
    RunVerdict,
    choose_arch,
    jit_policy,
    judge,
)
from flash_dist.toolkit.targets.devices import (
    ZSTD_CUDA,
    Device,
    Driver,
    driver_supports_toolkit,
    first_driver,
    parse_version,
    ptx_isa_cuda,
    toolkit_driver,
    toolkit_ptx_isa,
)

# --- Arch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "arch"),
    [
        ("sm_75", Arch(7, 5)),
        ("sm_90a", Arch(9, 0, "a")),
        ("sm_103f", Arch(10, 3, "f")),
        ("compute_80", Arch(8, 0, ptx=True)),
        ("compute_120a", Arch(12, 0, "a", ptx=True)),
        ("9.0a", Arch(9, 0, "a")),
        ("90a", Arch(9, 0, "a")),
        ("12.1", Arch(12, 1)),
        ("121", Arch(12, 1)),
        (" 8.6 ", Arch(8, 6)),
    ],
)
def test_parse_reads_every_spelling(text: str, arch: Arch) -> None:
    assert Arch.parse(text) == arch


@pytest.mark.parametrize(
    "text",
    [
        "",
        "9",
        "sm_",
        "sm90",
        "sm_9",
        "sm_90b",
        "90A",
        "9.0+PTX",
        "9.0.1",
        "sm_9.0",
        "1200",
        "-8.0",
        "sm_90\n\n7",
        "٩.0",
    ],
)
def test_parse_refuses_what_is_not_an_architecture(text: str) -> None:
    with pytest.raises(ArchError, match="looks like"):
        Arch.parse(text)


@pytest.mark.parametrize("ptx", [False, True], ids=["sass", "ptx"])
@pytest.mark.parametrize("arch", KNOWN_ARCHS, ids=str)
def test_printing_and_parsing_round_trip(arch: Arch, ptx: bool) -> None:  # noqa: FBT001
    arch = Arch(arch.major, arch.minor, arch.suffix, ptx=ptx)
    assert Arch.parse(str(arch)) == arch


def test_an_arch_knows_its_forms() -> None:
    arch, ptx = Arch.parse("sm_100f"), Arch.parse("compute_80")
    assert (arch.number, arch.dotted, arch.identifier) == (100, "10.0f", "sm100f")
    assert (ptx.number, ptx.dotted, ptx.identifier) == (80, "8.0", "compute80")
    assert arch.gencode == "-gencode=arch=compute_100f,code=sm_100f"
    assert ptx.gencode == "-gencode=arch=compute_80,code=compute_80"


def test_archs_sort_old_to_new_and_sass_before_ptx() -> None:
    texts = ["sm_75", "sm_80", "compute_80", "sm_90", "sm_90a", "sm_100", "sm_120"]
    assert [str(arch) for arch in sorted(map(Arch.parse, reversed(texts)))] == texts


@pytest.mark.parametrize(
    ("arch", "kib"),
    [
        ("sm_75", 64),
        ("compute_75", 64),
        ("sm_80", 163),
        ("sm_86", 99),
        ("sm_87", 163),
        ("sm_89", 99),
        ("sm_90a", 227),
        ("sm_100", 227),
        ("sm_103f", 227),
        ("sm_120", 99),
    ],
)
def test_shared_memory_limit_is_that_of_the_gpu_the_code_is_named_after(
    arch: str, kib: int
) -> None:
    assert Arch.parse(arch).smem_optin == kib * 1024


def test_an_unknown_device_gets_the_least_shared_memory_of_its_major() -> None:
    assert Device(8, 5).smem_optin == 99 * 1024
    assert Device(14, 0).smem_optin == 99 * 1024
    assert Device(4, 2).smem_optin == 48 * 1024


# --- What runs where ------------------------------------------------------------------------------

# target, compute capability, verdict. The sources:
#   [Ampere] [Ada] [Blackwell]  NVIDIA's compatibility guides of these names
#   [12.9 blog]  "NVIDIA Blackwell and NVIDIA CUDA 12.9 Introduce Family-Specific Architecture
#                Features", and "Compute Capabilities" in the CUDA Programming Guide
#   [13.0]       CUDA features archive: sm_101 was renamed to sm_110
#   [torch]      DEVICE_REQUIREMENT in torch/cuda/__init__.py: integrated GPUs stand alone
RUNS = """
    # SASS without suffix: same major, minor not older [Ampere, Ada, Blackwell]
    sm_75  7.5 native        sm_80  8.0 native        sm_90  9.0 native
    sm_80  8.6 same-major    sm_80  8.9 same-major    sm_86  8.9 same-major
    sm_86  8.0 no            sm_89  8.6 no            sm_80  9.0 no
    sm_80  7.5 no            sm_90  10.0 no           sm_75  8.0 no
    sm_120 12.0 native       sm_120 12.1 same-major   sm_121 12.0 no
    sm_100 10.0 native       sm_100 10.3 same-major   sm_103 10.0 no
    sm_100 12.0 no           sm_120 10.0 no           sm_70  7.5 same-major
    sm_80  8.8 same-major
    # between discrete and integrated: not promised [torch]
    sm_80  8.7 unverified    sm_86  8.7 unverified    sm_87  8.9 unverified
    sm_87  8.7 native        sm_87  8.6 no            sm_89  8.7 no
    sm_60  6.2 unverified    sm_70  7.2 unverified    sm_72  7.5 unverified
    sm_50  5.3 unverified
    # Thor: 10.1 and 11.0 are one chip [13.0]
    sm_101 11.0 native       sm_110 10.1 native       sm_110 11.0 native
    sm_101a 11.0 native      sm_110a 10.1 native      sm_110f 10.1 native
    sm_100 11.0 no           sm_110 12.0 no           sm_100 10.1 no
    sm_101 10.3 no           sm_101 10.7 no           sm_110 10.3 no
    # a: this chip only [Blackwell, 12.9 blog]
    sm_90a 9.0 native        sm_90a 10.0 no           sm_90a 8.9 no
    sm_100a 10.0 native      sm_100a 10.3 no          sm_100a 10.1 no
    sm_120a 12.0 native      sm_120a 12.1 no          sm_103a 10.3 native
    # f: this family, minor not older [12.9 blog]
    sm_100f 10.0 native      sm_100f 10.3 family      sm_100f 10.1 no
    sm_103f 10.3 native      sm_103f 10.0 no          sm_110f 11.0 native
    sm_120f 12.0 native      sm_120f 12.1 family      sm_120f 10.0 no
    sm_121f 12.1 native      sm_121f 12.0 no          sm_100f 12.0 no
    sm_101f 11.0 native      sm_100f 11.0 no          sm_103f 12.1 no
    sm_100f 10.7 family      sm_103f 10.7 family      sm_107f 10.3 no
    # PTX: everything newer, any major [Ampere, Blackwell]
    compute_75 7.5 jit       compute_75 8.6 jit       compute_75 12.1 jit
    compute_80 9.0 jit       compute_80 8.7 jit       compute_80 11.0 jit
    compute_89 9.0 jit       compute_89 12.1 jit      compute_89 8.6 no
    compute_90 8.9 no        compute_120 10.3 no      compute_120 12.1 jit
    compute_101 11.0 jit     compute_110 10.1 jit     compute_107 10.1 jit
    compute_101 10.3 no
    # PTX with a suffix: as SASS with that suffix [12.9 blog]
    compute_90a 9.0 jit      compute_90a 10.0 no      compute_90a 12.0 no
    compute_100a 10.3 no     compute_100f 10.3 jit    compute_100f 12.0 no
    compute_120f 12.1 jit    compute_121f 12.0 no     compute_110f 10.1 jit
"""
RUNS_ROWS = [
    tuple(words[place : place + 3])
    for line in RUNS.splitlines()
    if (words := line.split()) and words[0] != "#"
    for place in range(0, len(words), 3)
]


@pytest.mark.parametrize(("arch", "device", "how"), RUNS_ROWS, ids="-".join)
def test_verdicts_follow_the_table(arch: str, device: str, how: str) -> None:
    verdict = judge(Arch.parse(arch), Device.parse(device))
    assert verdict.how == how
    assert bool(verdict) == (how not in {"no", "unverified"})
    assert arch in verdict.reason
    assert device in verdict.reason


# Drivers: "Minor Version Compatibility" of the CUDA Compatibility guide (580 for 13.x, 525 for
# 12.x, 450 for 11.x; PTX of a newer minor is refused, error 222); the PTX ISA release history;
# nvcc's documentation of --compress-mode (zstd from the driver of CUDA 12.4 on).
CUDA_12 = Origin("12.4")
CUDA_13 = Origin("13.0", codec="zstd")
UNKNOWN = Origin(toolkit=None)


@pytest.mark.parametrize(
    ("arch", "driver", "origin", "how", "words"),
    [
        ("sm_80", "580", CUDA_13, "native", ""),
        ("sm_80", "580.65.06", CUDA_13, "native", ""),
        ("sm_80", "590", CUDA_13, "native", ""),
        ("sm_80", "535", CUDA_13, "no", "needs driver 580 or newer, not driver 535 (CUDA 12.2)"),
        ("sm_80", "575", CUDA_13, "no", "needs driver 580"),
        ("compute_80", "575", CUDA_13, "no", "needs driver 580"),
        ("compute_80", "580", CUDA_13, "jit", ""),
        # a newer minor toolkit: its SASS loads, its PTX does not
        ("sm_80", "580", Origin("13.2"), "native", ""),
        ("compute_80", "580", Origin("13.1"), "no", "PTX ISA 9.1 needs driver 590"),
        ("compute_80", "590", Origin("13.1"), "jit", ""),
        ("compute_80", "590", Origin("13.2"), "no", "PTX ISA 9.2 needs driver 595 or newer"),
        ("compute_80", "595", Origin("13.2"), "jit", ""),
        ("compute_80", "615", Origin("13.4"), "jit", ""),
        ("compute_80", "700", Origin("13.4"), "jit", ""),
        ("compute_80", "615", Origin("13.5"), "no", "PTX ISA 9.5 needs driver 620 or newer"),
        ("compute_80", "620", Origin("13.5"), "jit", ""),
        # newer than the table: no known driver loads it
        ("compute_80", "620", Origin("13.9"), "no", "PTX of CUDA 13.9 needs a driver newer than"),
        ("compute_80", "700", Origin("13.9"), "unverified", "PTX of CUDA 13.9 is newer than this"),
        ("sm_80", "580", Origin("13.9"), "native", ""),
        ("sm_80", "700", Origin("14.0"), "unverified", "newer than this version of flash_dist"),
        ("sm_80", "615", Origin("14.0"), "no", "needs a driver for CUDA 14.0 or newer"),
        ("sm_80", "525", CUDA_12, "native", ""),
        ("sm_80", "520", CUDA_12, "no", "needs driver 525"),
        ("compute_80", "545", CUDA_12, "no", "PTX ISA 8.4 needs driver 550"),
        ("compute_80", "550", CUDA_12, "jit", ""),
        ("sm_80", "450", Origin("11.8"), "native", ""),
        ("sm_80", "440", Origin("11.8"), "no", "needs driver 450"),
        # The driver of CUDA 12.4 is the first with zstd; every driver has LZ4.
        ("sm_80", "545", Origin("12.8", codec="zstd"), "no", "zstd needs driver 550"),
        ("sm_80", "545", Origin("12.8", codec="lz4"), "native", ""),
        ("sm_80", "550", Origin("12.8", codec="zstd"), "native", ""),
        # the entry's PTX ISA overrides the toolkit's
        ("compute_80", "525", Origin("12.8", ptx_isa=(8, 0)), "jit", ""),
        ("compute_80", "525", Origin(None, ptx_isa=(8, 1)), "no", "PTX ISA 8.1 needs driver 530"),
        ("compute_80", "580", Origin(None, ptx_isa=(99, 0)), "no", "PTX ISA 99.0 needs a driver"),
        ("compute_80", "620", Origin(None, ptx_isa=(9, 6)), "no", "newer than driver 620 (CUDA "),
        ("compute_80", "700", Origin(None, ptx_isa=(9, 6)), "unverified", "PTX ISA 9.6"),
        ("sm_80", "450", UNKNOWN, "native", ""),
        ("compute_80", "450", UNKNOWN, "jit", ""),
    ],
)
def test_the_driver_has_a_say(arch: str, driver: str, origin: Origin, how: str, words: str) -> None:
    verdict = judge(Arch.parse(arch), Device(8, 0), Driver.parse(driver), origin)
    assert verdict.how == how
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("device", "driver", "words"),
    [
        ("7.0", "580", ""),
        ("7.0", "590", "7.0 needs driver 580 or older, not driver 590 (CUDA 13.1)"),
        ("5.2", "700", "5.2 needs driver 580 or older"),
        ("7.5", "700", ""),
        ("12.0", "565", "12.0 needs driver 570 or newer, not driver 565 (CUDA 12.7)"),
        ("10.7", "610", "10.7 needs driver 615 or newer"),
    ],
)
def test_a_driver_works_neither_newer_gpus_nor_those_that_it_dropped(
    device: str, driver: str, words: str
) -> None:
    image = (Arch.parse("compute_50"), Device.parse(device), Driver.parse(driver))
    origin = Origin(None, (7, 0))
    verdict = judge(*image, origin, jit=JitPolicy(disabled="CUDA_DISABLE_JIT" if words else ""))
    assert verdict.how == ("no" if words else "jit")
    assert words in verdict.reason


def test_the_gpu_is_judged_before_the_driver() -> None:
    verdict = judge(Arch.parse("sm_90a"), Device(8, 6), Driver.parse("535"))
    assert "driver" not in verdict.reason


@pytest.mark.parametrize(
    ("environ", "policy", "sass", "ptx"),
    [
        ({}, JitPolicy(), "native", "jit"),
        ({"CUDA_FORCE_PTX_JIT": "0", "CUDA_DISABLE_PTX_JIT": ""}, JitPolicy(), "native", "jit"),
        ({"CUDA_FORCE_PTX_JIT": "1"}, JitPolicy("CUDA_FORCE_PTX_JIT"), "no", "jit"),
        ({"CUDA_DISABLE_PTX_JIT": "1"}, JitPolicy("", "CUDA_DISABLE_PTX_JIT"), "native", "no"),
        ({"CUDA_FORCE_JIT": "1"}, JitPolicy("CUDA_FORCE_JIT"), "no", "jit"),
        ({"CUDA_DISABLE_JIT": "1"}, JitPolicy("", "CUDA_DISABLE_JIT"), "native", "no"),
        ({"CUDA_FORCE_PTX_JIT": "0", "CUDA_FORCE_JIT": "1"}, JitPolicy(), "native", "jit"),
        (
            {"CUDA_FORCE_PTX_JIT": "1", "CUDA_DISABLE_PTX_JIT": "1"},
            JitPolicy("CUDA_FORCE_PTX_JIT", "CUDA_DISABLE_PTX_JIT"),
            "no",
            "no",
        ),
    ],
)
def test_variables_of_cuda_change_the_verdict(
    environ: dict[str, str], policy: JitPolicy, sass: str, ptx: str
) -> None:
    jit = jit_policy(environ)
    assert jit == policy
    assert judge(Arch.parse("sm_80"), Device(8, 0), jit=jit).how == sass
    assert judge(Arch.parse("compute_80"), Device(8, 0), jit=jit).how == ptx


def test_verdicts_rank_from_native_to_no() -> None:
    hows = ["native", "family", "same-major", "jit", "unverified", "no"]
    assert [RunVerdict(how, "").rank for how in hows] == list(range(6))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("archs", "device", "chosen", "how"),
    [
        ("7.5;8.0+PTX;9.0a;10.0;12.0", "8.6", "sm_80", "same-major"),
        ("7.5;8.0+PTX;9.0a;10.0;12.0", "8.7", "compute_80", "jit"),
        ("7.5;8.0+PTX;9.0a;10.0;12.0", "9.0", "sm_90a", "native"),
        ("7.5;8.0+PTX;9.0a;10.0;12.0", "11.0", "compute_80", "jit"),
        ("7.5;8.0;8.6;8.9+PTX", "12.1", "compute_89", "jit"),
        ("7.5;8.0;8.6", "8.9", "sm_86", "same-major"),
        ("7.5;8.0;8.6", "8.7", "sm_86", "unverified"),
        ("9.0;9.0a", "9.0", "sm_90a", "native"),
        ("10.0;10.0f;10.0a", "10.3", "sm_100f", "family"),
        ("7.5+PTX;8.0+PTX", "9.0", "compute_80", "jit"),
        ("9.0a", "8.6", None, ""),
    ],
)
def test_the_best_target_is_chosen(archs: str, device: str, chosen: str | None, how: str) -> None:
    choice = choose_arch(ArchSet.parse(archs).archs, Device.parse(device), Driver.parse("580"))
    assert (choice and (str(choice[0]), choice[1].how)) == (chosen and (chosen, how))


# --- Device and Driver ----------------------------------------------------------------------------


def test_a_device_parses_and_prints() -> None:
    assert str(Device.parse("12.1")) == "12.1"
    assert Device.parse("8.6").number == 86
    assert [Device.parse(cc).integrated for cc in ("8.7", "11.0", "8.6")] == [True, True, False]


@pytest.mark.parametrize("text", ["", "8", "86", "sm_86", "8.6a", "8.65", "0.1"])
def test_a_malformed_compute_capability_is_named(text: str) -> None:
    with pytest.raises(ArchError, match=f"got `{text}`"):
        Device.parse(text)


@pytest.mark.parametrize(
    ("release", "cuda"),
    [
        ("450", (11, 0)),
        ("525", (12, 0)),
        ("530", (12, 1)),
        ("535", (12, 2)),
        ("545", (12, 3)),
        ("550", (12, 4)),
        ("555", (12, 5)),
        ("560", (12, 6)),
        ("565", (12, 7)),
        ("570", (12, 8)),
        ("575", (12, 9)),
        ("580.65.06", (13, 0)),
        ("590", (13, 1)),
        ("572.16", (12, 8)),
        ("390", (9, 0)),
        ("595.71.05", (13, 2)),
        ("610", (13, 3)),
        ("615", (13, 4)),
        ("620.70.06", (13, 5)),
        ("999", (13, 5)),
    ],
)
def test_a_driver_release_tells_its_cuda_version(release: str, cuda: tuple[int, int]) -> None:
    assert Driver.parse(release).cuda == cuda


def test_a_driver_prints_its_release_and_cuda_version() -> None:
    assert str(Driver.parse("580.65.06")) == "driver 580.65.06 (CUDA 13.0)"
    assert str(Driver.from_cuda_version(12080)) == "a driver for CUDA 12.8"
    assert Driver.from_cuda_version(13000, "535.1").cuda == (13, 0)


@pytest.mark.parametrize("text", ["", "abc", "58", "580.", "580,1", "v580"])
def test_a_malformed_driver_is_named(text: str) -> None:
    with pytest.raises(ArchError, match="driver release looks like"):
        Driver.parse(text)


def test_helpers_answer_for_toolkits_and_drivers() -> None:
    assert [toolkit_driver(toolkit) for toolkit in ("11.8", "12.9", "13.2")] == [450, 525, 580]
    assert [toolkit_ptx_isa(toolkit) for toolkit in ("12.6", "12.9", "13.0.88", "13.1")] == [
        (8, 5),
        (8, 8),
        (9, 0),
        (9, 1),
    ]
    assert ptx_isa_cuda((8, 6)) == (12, 7)
    assert ptx_isa_cuda((50, 0)) is None
    assert first_driver((12, 4)) == 550
    assert first_driver((50, 0)) is None
    old, new = Driver.parse("535"), Driver.parse("580")
    assert [driver.cuda >= ZSTD_CUDA for driver in (old, new)] == [False, True]
    assert [driver_supports_toolkit(driver, "13.0") for driver in (old, new)] == [False, True]


@pytest.mark.parametrize("text", ["", "13", "x.y", "13.x"])
def test_a_malformed_cuda_version_is_named(text: str) -> None:
    with pytest.raises(ArchError, match="CUDA version looks like"):
        parse_version(text)


# --- ArchSet --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "canonical", "label"),
    [
        ("7.5 8.6", "7.5;8.6", "sm75.sm86"),
        ("8.6;7.5", "7.5;8.6", "sm75.sm86"),
        (" 8.6 ; 7.5 ;", "7.5;8.6", "sm75.sm86"),
        ("12.0;9.0a;7.5;10.0;8.0+PTX", "7.5;8.0+PTX;9.0a;10.0;12.0", None),
        ("8.9+PTX", "8.9+PTX", "sm89.compute89"),
        ("8.9+ptx;8.9", "8.9+PTX", "sm89.compute89"),
        ("9.0a+PTX", "9.0a+PTX", "sm90a.compute90a"),
        ("compute_75", "compute_75", "compute75"),
        ("compute_75;sm_75", "7.5+PTX", "sm75.compute75"),
        ("90a 120", "9.0a;12.0", "sm90a.sm120"),
        ("Ampere", "8.0;8.6+PTX", "sm80.sm86.compute86"),
        ("turing Ada", "7.5+PTX;8.9+PTX", None),
        ("Hopper", "9.0+PTX", None),
        ("Blackwell", "10.0;10.3;12.0;12.1+PTX", None),
        ("Ampere+Tegra", "8.7", "sm87"),
        ("5.2;8.0;8.0", "5.2;8.0", "sm52.sm80"),
    ],
)
def test_a_list_parses_to_its_canonical_form(text: str, canonical: str, label: str | None) -> None:
    archset = ArchSet.parse(text)
    assert str(archset) == canonical
    assert ArchSet.parse(canonical).archs == archset.archs
    assert list(archset.archs) == sorted(archset.archs)
    if label is not None:
        assert archset.label == label


def test_a_set_gives_one_flag_per_target() -> None:
    assert ArchSet.parse("8.0+PTX;9.0a").gencode_flags == (
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_80,code=compute_80",
        "-gencode=arch=compute_90a,code=sm_90a",
    )


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("8.0;9.5", "unknown architecture `9.5` in arch set `mine` (`8.0;9.5`)", "`9.0`"),
        ("sm_95", "unknown architecture `sm_95`", "`sm_90a`|`sm_90`|`sm_75`"),
        ("9.0b", "malformed architecture `9.0b`", "`9.0"),
        ("hoper", "malformed architecture `hoper`", "`Hopper`"),
        ("8,0", "malformed architecture `8,0`", "`8.0`"),
        ("8.0+PTX+PTX", "malformed architecture `8.0+PTX+PTX`", ""),
        ("sm_80+PTX", "malformed architecture `sm_80+PTX`", ""),
        ("8.0a", "unknown architecture `8.0a`", "`8.0`"),
        ("", "no architecture in arch set `mine`", "8.0;9.0a+PTX"),
        (" ; ", "no architecture in arch set `mine`", ""),
        ("zzz", "malformed architecture `zzz`", ""),
    ],
)
def test_a_wrong_list_names_the_value_the_list_and_the_nearest(
    text: str, words: str, hint: str
) -> None:
    with pytest.raises(ArchError) as caught:
        ArchSet.parse(text, name="mine")
    assert words in caught.value.message
    assert f"(`{text}`)" in caught.value.message
    assert any(option in (caught.value.hint or "") for option in hint.split("|"))


def test_targets_that_the_toolkit_cannot_compile_are_an_error_with_a_hint() -> None:
    archset = ArchSet.parse("5.2;7.0+PTX;8.0", name="old")
    assert [str(arch) for arch in unsupported(archset, "13.0")] == ["sm_52", "sm_70", "compute_70"]
    with pytest.raises(ArchError, match=r"CUDA 13\.0 cannot compile `sm_52`, `sm_70`") as caught:
        require_supported(archset, "13.0")
    assert "--skip-unsupported" in (caught.value.hint or "")
    kept = require_supported(archset, "13.0", skip_unsupported=True)
    assert (str(kept), kept.label) == ("8.0", "sm80")


def test_nothing_left_to_compile_is_an_error_even_when_skipping() -> None:
    with pytest.raises(ArchError, match="cannot compile `sm_52`"):
        require_supported(ArchSet.parse("5.2"), "13.0", skip_unsupported=True)


def test_a_newer_toolkit_of_a_known_major_compiles_what_the_last_known_one_did() -> None:
    assert unsupported(ArchSet.parse("7.5;12.1f"), "13.9") == ()
    with pytest.raises(ArchError, match=r"CUDA 12\.0 or newer, got CUDA 11\.8"):
        unsupported(ArchSet.parse("7.5"), "11.8")


def test_named_lists_hold_known_architectures_only() -> None:
    assert all(ArchSet.parse(name).archs for name in NAMED_LISTS)
    assert str(ArchSet.parse("Rubin")) == "10.7+PTX"
    assert all(archs == tuple(sorted(archs)) for archs in TOOLKIT_ARCHS.values())
