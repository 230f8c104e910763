"""Messages from public threads, with the changes that logs and terminals make."""

from __future__ import annotations

import random
import re
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.findings.explain import explain, suggest
from flash_dist.toolkit.findings.phrases import Phrase, Text, squeeze
from flash_dist.toolkit.make.project import read_pyproject as read_toml

if TYPE_CHECKING:
    from collections.abc import Callable

DATA: Final = Path(__file__).with_name("messages.toml")
MESSAGES: Final[list[dict[str, Any]]] = read_toml(DATA)["message"]
OURS: Final = [one for one in MESSAGES if one["ids"]]
STRANGE: Final = [one for one in MESSAGES if not one["ids"]]
REPORTS: Final = [  # ids and a message of public reports whose threads were not kept
    line.split("\t") for line in DATA.with_name("reports.tsv").read_text("utf-8").splitlines()
]
DOCUMENTED: Final = {  # documented by CUDA, the loader or a library, but found in no thread
    "PTX JIT compilation was disabled": "jit-disabled",
    "RuntimeError: Expect q/k/v and block_mask to be on the same device but got cuda:1 and "
    "cuda:0.": "flex-mask-device",
    "a.so: undefined symbol: _PyThreadState_UncheckedGet": "python-abi",
    "a.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs": "torch-old-abi",
    "libcuda.so.1: file too short": "libcuda-empty",
    "failed call to cuInit: CUDA_ERROR_OUT_OF_MEMORY: out of memory": "start-memory",
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling "
    "NumCudaDevices() that might have already set an error? Error 101: invalid device "
    "ordinal": "device-refused",
    "CUDA error: device doesn't have valid Grid license": "gpu-licence",
    "CUDA error: uncorrectable NVLink error detected during the execution": "nvlink-error",
    "AssertionError: FP8 is only supported on SM100 (compute capability 10.x) for FA4 "
    "CuTe.": "flash-attention-fp8",
    "RuntimeError: VLLM batch_invariant mode requires an attention backend in ['FLASH_ATTN', "
    "'TRITON_ATTN'], but got 'None'.": "vllm-batch-invariant",
    "a.so: cannot open shared object file: Permission denied": "library-denied",
    "a.so: cannot open shared object file: Too many open files": "file-limit",
    "a.so: cannot open shared object file: Stale file handle": "file-system-fails",
    "a.so: cannot open shared object file: Input/output error": "file-system-fails",
    "libcuda.so.1: cannot open shared object file: Permission denied": "library-denied",
    "libc10_cuda.so: cannot open shared object file: Stale file handle": "file-system-fails",
    "a.so: cannot open shared object file: Structure needs cleaning": "library-unopened",
    "ModuleNotFoundError: No module named 'flash_attn_3'": "flash-attn-3-absent",
    "ATen.h:5:2: error: #error C++20 or later compatible compiler is required to use "
    "ATen.": "cpp-too-old",
    "a.cu:1:10: fatal error: cuda_runtime.h: No such file or directory": "cuda-toolkit-absent",
    "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.": "hashes-differ",
    "Because there is no version of flash-dist==9 and you require it": "no-matching-distribution",
}


def ids(text: str) -> list[str]:
    return [one.entry.id for one in explain(text)]


def name(message: dict[str, Any]) -> str:
    return f"{'+'.join(message['ids']) or 'none'}-{message['source'].partition('.com/')[2]}"


def test_there_are_enough_messages_and_each_has_its_source() -> None:
    assert len(OURS) >= 60
    assert len(STRANGE) >= 20
    assert len({one["text"] for one in MESSAGES}) == len(MESSAGES)
    for one in MESSAGES:
        assert one["source"].startswith("https://github.com/")


@pytest.mark.parametrize("message", MESSAGES, ids=name)
def test_a_message_of_a_public_thread_is_explained_or_is_none_of_ours(
    message: dict[str, Any],
) -> None:
    assert ids(message["text"]) == message["ids"]


@pytest.mark.parametrize(("causes", "text"), REPORTS, ids=[one[1][:60] for one in REPORTS])
def test_a_message_of_a_public_report_is_explained(causes: str, text: str) -> None:
    assert ids(text) == causes.split("+")


@pytest.mark.parametrize(("text", "cause"), DOCUMENTED.items(), ids=list(DOCUMENTED))
def test_a_documented_message_is_explained(text: str, cause: str) -> None:
    assert ids(text) == [cause]


def test_each_entry_that_knows_messages_knows_a_real_one() -> None:
    known = {cause for one in OURS for cause in one["ids"]} | set(DOCUMENTED.values())
    known |= {cause for causes, _ in REPORTS for cause in causes.split("+")}
    assert known == {one.id for one in FINDINGS.values() if one.messages or one.codes}


def test_a_phrase_is_known_to_its_entry_alone() -> None:
    for entry in FINDINGS.values():
        for phrase in entry.messages:
            example = phrase.format_map(Example())
            assert ids(example) == [entry.id], example


class Example(dict[str, str]):
    """Possible values of a phrase's variable parts."""

    def __missing__(self, place: str) -> str:
        examples = {
            "library": "libexample.so.12",
            "python_symbol": "PyObject_Vectorcall",
            "torch_library": "libtorch_cuda.so",
            "torch_symbol": "_ZN3c105ErrorD1Ev",
            "old_abi_symbol": "_ZN3c105ErrorC2ENS_14SourceLocationESs",
            "requirement": "torch==1.2",
        }
        return examples.get(place, "1.2")


# --- As pasted ------------------------------------------------------------------------------------


def colour(text: str) -> str:
    words = text.split(" ")
    return " ".join(f"\x1b[1;31m{one}\x1b[0m" for one in words)


def prefix(text: str) -> str:
    return f"ERROR 11-22 19:45:07 [core.py:936] (EngineCore pid=68) {text.strip()}"


def wrap_hard(text: str) -> str:
    """Break lines like a terminal of 37 columns: within words."""
    lines = (line[at : at + 37] for line in text.split("\n") for at in range(0, len(line) or 1, 37))
    return "\n".join(lines)


def wrap_in_a_frame(text: str) -> str:
    lines = (part for line in text.split("\n") for part in textwrap.wrap(line, 50) or [""])
    return "\n".join(f"│ {line:<50} │" for line in lines)


def quote(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.split("\n"))


def lose_quotes(text: str) -> str:
    return text.translate(dict.fromkeys(map(ord, "`'\"\u2018\u201c\u201d")))


CURLED: Final = str.maketrans("`'\"", "\u2018\u2019\u201c")
PASTED: Final[dict[str, Callable[[str], str]]] = {
    "colour": colour,
    "citation": quote,
    "frame": wrap_in_a_frame,
    "hard wrap": wrap_hard,
    "no quotes": lose_quotes,
    "other quotes": lambda text: text.translate(CURLED),
    "small letters": str.lower,
    "time stamps": prefix,
    "windows lines": lambda text: text.replace("\n", "\r\n"),
}


@pytest.mark.parametrize("pasted", PASTED.values(), ids=list(PASTED))
def test_how_it_is_pasted_does_not_matter(pasted: Callable[[str], str]) -> None:
    for one in MESSAGES:
        assert ids(pasted(one["text"])) == one["ids"], pasted(one["text"])


def test_a_log_with_many_causes_explains_each_once_as_they_come() -> None:
    shuffled = [one for one in MESSAGES if len(one["ids"]) < 2]
    random.Random(7).shuffle(shuffled)  # noqa: S311 - the same order in every run
    noise = "[12/73] Building CUDA object flash_bwd_hdim128_bf16_sm80.cu.o ... done\n"
    log = f"\n{noise * 40}".join([one["text"] for one in shuffled] * 2)
    expected = list(dict.fromkeys(cause for one in shuffled for cause in one["ids"]))
    assert ids(log) == expected


def test_the_longer_of_two_overlapping_phrases_counts() -> None:
    missing = "cannot open shared object file: No such file or directory"
    assert ids(f"libcuda.so.1: {missing}") == ["driver-absent"]
    assert ids(f"libcudart.so.12: {missing}") == ["library-missing"]
    assert ids(f"libcudart.so.12: {missing}\nlibcuda.so.1: {missing}") == [
        "library-missing",
        "driver-absent",
    ]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("FATAL: kernel ... is for sm80-sm100, but was built for sm75", "printf-stub"),
        ("CUDA error: no kernel ... execution on the device", "no-kernel-image"),
        ("no kernel image \u2026", "no-kernel-image"),
        ("...is available for execution on the device", "no-kernel-image"),
        ("sm_120 ... current PyTorch installation", "torch-lacks-gpu"),
        ("undefined symbol: ...", "undefined-symbol"),
        ("version ... not found", None),  # the library is unknown
        ("Downloading ... done", None),
        ("...", None),
    ],
)
def test_an_elision_stands_for_anything(text: str, cause: str | None) -> None:
    assert ids(text) == ([cause] if cause else [])


def test_details_of_a_message_are_in_the_summary() -> None:
    (found,) = explain(
        "The detected CUDA version (11.8) mismatches the version that was used to compile\n"
        "PyTorch (12.4). Please make sure to use the same CUDA versions."
    )
    assert re.search(r"CUDA 11\.8\b.* CUDA 12\.4$", found.summary)
    (found,) = explain("FATAL: kernel ... is for sm80-sm100, but was built for sm75")
    assert "compiled for sm_75" in found.summary
    (found,) = explain("'The detected CUDA version (12.1) mismatches")
    assert found.summary == found.entry.title
    (found,) = explain("version `GLIBC_...' not found")
    assert found.summary == found.entry.title


def test_ids_that_a_report_names_are_explained() -> None:
    report = "[fail]  gpu 0  (more: `python -m flash_dist explain\n   no-matching-code`)"
    assert ids(f"{report}\n(more: `explain no-such-id`)") == ["no-matching-code"]
    assert ids("https://example.org/findings.html#no-gpu") == ["no-gpu"]


@pytest.mark.parametrize(
    "text",
    [
        "ModuleNotFoundError: No module named 'torchvision'",
        "ModuleNotFoundError: No module named 'torch._C'",
        "ModuleNotFoundError: No module named 'torch_geometric'\nTraceback",
        "No module named 'triton.ops'",
        "gzip: file too short",
        "kernel_symbol: undefined",
        "out of memory",
    ],
)
def test_a_name_that_goes_on_is_another_one(text: str) -> None:
    assert ids(text) == []


# --- Similar texts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("instal-damaged", "install-damaged"),
        ("glibc", "glibc-too-old"),
        ("docker", "container-toolkit"),
        ("no kernel imgae is availible", "no-kernel-image"),
        ("version ... not found", "glibc-too-old"),
        ("cuda out memory", "out-of-memory"),
    ],
)
def test_similar_messages_are_suggested(text: str, near: str) -> None:
    assert not explain(text)
    offered = [one.id for one in suggest(text)]
    assert near in offered
    assert len(offered) <= 3


def test_nothing_is_offered_for_what_is_far() -> None:
    for text in ("a sentence that is about something else", "xyzzy", "\n".join(["word"] * 500)):
        assert not suggest(text)


# --- Bounds ---------------------------------------------------------------------------------------


def test_a_long_log_takes_seconds() -> None:
    lines = [f"[{n}/73] nvcc -gencode arch=compute_{n} (not found) ... done" for n in range(60_000)]
    start = time.process_time()
    assert ids("\n".join([*lines, "Torch not compiled with CUDA enabled"])) == ["torch-cpu-build"]
    assert ids("." * 1_000_000) == []
    assert ids("undefined symbol: " * 100_000) == ["undefined-symbol"]
    assert ids("undefined symbol: " + "a." * 500_000) == ["undefined-symbol"]
    assert time.process_time() - start < 60


def test_a_phrase_is_found_where_it_is_and_counted_without_spaces() -> None:
    text = Text.read("  a\x1b[1m b\x1b[0m\n| version `GLIBC_2.34' not found")
    (place,) = Phrase.parse("version `GLIBC_{version}' not found").find(
        text.spaced, squeeze(text.spaced)
    )
    assert (place.start, place.found) == (2, {"version": "2.34"})
