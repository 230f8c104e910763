"""What an error message about GPU code, or the id of a finding, means, and what to do.

Sources: CUDA runtime API, "Data types used by CUDA Runtime" (error texts and numbers); xformers and
CUTLASS (the texts that their stubs print); the dynamic loader of glibc.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..binaries.demangle import demangle
from . import find, page_of

if TYPE_CHECKING:
    from collections.abc import Callable

_JUDGE: Final = "`python -m flash_dist doctor --package NAME` says it of every library of a package"


@dataclass(frozen=True)
class Explanation:
    """What happened, why, and the steps that help, the surest first."""

    id: str
    summary: str
    details: tuple[str, ...]
    steps: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {
            "version": 1,
            "id": self.id,
            "summary": self.summary,
            "details": list(self.details),
            "steps": list(self.steps),
            "docs": page_of(self.id),
        }


def explain(message: str) -> Explanation | None:
    """Return what is known of a message, or of the id of a finding; None if nothing is."""
    entry = find(message.strip())
    if entry is not None:
        return Explanation(message.strip(), entry.title, (entry.meaning,), (entry.remedy,))
    for pattern, known in _KNOWN:
        match = pattern.search(message)
        if match is not None:
            return known if isinstance(known, Explanation) else known(match)
    return None


def _printf_stub(match: re.Match[str]) -> Explanation:
    kernel, first, last, built = match.group("kernel", "first", "last", "built")
    return Explanation(
        "printf-stub",
        f"the kernel that ran is a stub: {kernel} was compiled for sm_{built}, where its body is "
        f"this message; it has one from sm_{first} to below sm_{last}",
        (
            "nothing is broken: a library holds such stubs, and its dispatcher is to avoid them",
            (
                "the dispatcher chose by another GPU than the one that ran it, as in a box with "
                "GPUs of several kinds; or the library has nothing newer for this GPU, so that "
                f"the driver took its code for sm_{built}"
            ),
        ),
        (
            (
                "show the program GPUs of one kind only: set CUDA_VISIBLE_DEVICES to those newer "
                f"than {_dotted(built)}"
            ),
            f"or call on the other only what supports it: this kernel needs {_dotted(first)}",
            (
                f"`python -m flash_dist inspect --level coverage --kernel {kernel} FILE` shows "
                "where it is real"
            ),
        ),
    )


def _dotted(number: str) -> str:
    return f"{number[:-1]}.{number[-1]}"


_CONDITIONAL_MMA: Final = Explanation(
    "arch-conditional-stub",
    "a CUTLASS kernel was called whose matrix instructions exist on one architecture only "
    "(sm_90a, sm_100a), compiled for a target without the suffix",
    ("the driver took the image without `a`, or compiled plain PTX for a newer GPU",),
    (
        "build the library for 9.0a instead of 9.0 (10.0a instead of 10.0)",
        "`python -m flash_dist inspect --level coverage FILE` shows which targets are real",
    ),
)

_NO_IMAGE: Final = Explanation(
    "no-kernel-image",
    "the library has no code that this GPU can run: neither SASS of its major with an equal "
    "or older minor, nor PTX",
    ("cudaErrorNoKernelImageForDevice, 209",),
    (
        _JUDGE,
        (
            "install a build for this compute capability, or build it with "
            "TORCH_CUDA_ARCH_LIST set to it"
        ),
    ),
)

_INVALID_IMAGE: Final = Explanation(
    "invalid-image",
    "the driver does not understand the image: most often it is compressed with zstd, which "
    "drivers before 550 (CUDA 12.4) do not know",
    ("cudaErrorInvalidKernelImage, 200",),
    (
        "install NVIDIA driver 550 or newer",
        _JUDGE,
        "whoever builds it: nvcc --compress-mode=speed keeps to LZ4",
    ),
)

_NEW_PTX: Final = Explanation(
    "ptx-too-new",
    "the PTX was written by a newer CUDA than the driver's: SASS may be newer within a major "
    "version of CUDA, PTX may not",
    ("cudaErrorUnsupportedPtxVersion, 222",),
    ("install a newer NVIDIA driver", "or a build that has SASS for this GPU", _JUDGE),
)

_NO_JIT: Final = Explanation(
    "jit-compiler-absent",
    "the library has only PTX for this GPU, and the driver's compiler for it is not there",
    (
        "cudaErrorJitCompilerNotFound, 221",
        (
            "libnvidia-ptxjitcompiler.so.1 belongs to the driver; containers get it with the "
            "capability `compute`"
        ),
    ),
    (
        "start the container with NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        "or install a build that has SASS for this GPU",
    ),
)

_JIT_DISABLED: Final = Explanation(
    "jit-disabled",
    "the library has only PTX for this GPU, and CUDA_DISABLE_PTX_JIT forbids to compile it",
    ("cudaErrorJitCompilationDisabled, 223",),
    ("`unset CUDA_DISABLE_PTX_JIT`", "or install a build that has SASS for this GPU"),
)

_OLD_DRIVER: Final = Explanation(
    "driver-too-old",
    "the driver is older than the CUDA runtime needs: CUDA 12 needs 525, CUDA 13 needs 580",
    ("cudaErrorInsufficientDriver, 35",),
    ("install a newer NVIDIA driver", "or a build for an older CUDA"),
)


def _undefined_symbol(match: re.Match[str]) -> Explanation:
    symbol = match["symbol"]
    return Explanation(
        "undefined-symbol",
        f"the library was compiled for another version of what it uses: `{demangle(symbol)}` is "
        "not there",
        ("a name of c10, at or torch is torch's: its C++ interface differs between minor versions",)
        if re.search(r"c10|2at|5torch", symbol)
        else (),
        (
            (
                "install the build for the torch that is here (`python -c 'import torch; "
                "print(torch.__version__)'`)"
            ),
            (
                "or compile it against that torch: `pip install --no-build-isolation --no-binary "
                "NAME NAME`"
            ),
        ),
    )


_KNOWN: Final[
    tuple[tuple[re.Pattern[str], Explanation | Callable[[re.Match[str]], Explanation]], ...]
] = (
    (
        re.compile(
            r"kernel [`']?(?P<kernel>\w+)[`']? is for sm(?P<first>\d+)-sm(?P<last>\d+), "
            r"but was built for sm(?P<built>\d+)"
        ),
        _printf_stub,
    ),
    (re.compile(r"Arch conditional MMA", re.IGNORECASE), _CONDITIONAL_MMA),
    (re.compile(r"no kernel image is available", re.IGNORECASE), _NO_IMAGE),
    (re.compile(r"device kernel image is invalid", re.IGNORECASE), _INVALID_IMAGE),
    (re.compile(r"PTX was compiled with an unsupported toolchain", re.IGNORECASE), _NEW_PTX),
    (re.compile(r"PTX JIT compiler library not found", re.IGNORECASE), _NO_JIT),
    (re.compile(r"PTX JIT compilation was disabled", re.IGNORECASE), _JIT_DISABLED),
    (re.compile(r"driver version is insufficient", re.IGNORECASE), _OLD_DRIVER),
    (re.compile(r"undefined symbol: (?P<symbol>\w+)"), _undefined_symbol),
)
