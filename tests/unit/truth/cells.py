"""Libraries and machines as inputs of the rules, and the answers of doctor and of the rules."""

from __future__ import annotations

import json
import zipfile
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.cli import main
from tests.unit.made.builds import make_variants
from tests.unit.made.fatbin_builder import (
    FOR_ONE_CHIP,
    PTX,
    SASS,
    Kernel,
    container,
    cubin,
    entry,
    library,
    ptx,
)
from tests.unit.made.wheels import make_manifest
from tests.unit.truth.rules import Image, Library, Number, parse_number, write_isa

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT: Final = Path(__file__).parents[3]
GPUS: Final = (
    (5, 2), (7, 0), (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 1), (10, 3),
    (10, 7), (11, 0), (12, 0), (12, 1), (13, 0),
)  # fmt: skip
DRIVERS: Final = (
    450, 455, 460, 465, 470, 495, 510, 515, 520, 525, 530, 535, 545, 550, 555, 560, 565, 570, 575,
    580, 590, 595, 600, 610, 615, 620, 700,
)  # fmt: skip
VARIABLES: Final[dict[str, dict[str, str]]] = {
    "nothing-set": {},
    "forced": {"CUDA_FORCE_PTX_JIT": "1"},
    "disabled": {"CUDA_DISABLE_PTX_JIT": "1"},
    "both": {"CUDA_FORCE_PTX_JIT": "1", "CUDA_DISABLE_PTX_JIT": "1"},
    "forced-newer-name": {"CUDA_FORCE_JIT": "1"},
    "disabled-newer-name": {"CUDA_DISABLE_JIT": "1"},
    "older-name-says-no": {
        "CUDA_FORCE_PTX_JIT": "0",
        "CUDA_FORCE_JIT": "1",
        "CUDA_DISABLE_PTX_JIT": "0",
        "CUDA_DISABLE_JIT": "1",
    },
    "of-no-effect": {
        "CUDA_CACHE_DISABLE": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_MODULE_LOADING": "EAGER",
    },
}


HOW: Final = {  # doctor's words, and the rules' distinctions
    "native": "native",
    "same-major": "native",
    "family": "native",
    "jit": "jit",
    "unverified": "unpromised",
    "no": "no",
    "none": "no",
    "not-on-this-hardware": "no",
}
OBSTACLES: Final = {  # doctor's words for each rule against running code; first match
    "or older, not": "ends",
    "a GPU of compute capability": "begins",
    "so the driver ignores": "force",
    "so the driver does not compile": "disable",
    "code built with CUDA": "minor",
    "compressed with zstd": "compression",
    "PTX ISA": "isa",
    "no code that it can load": "code",
    "has no matching code": "code",
    "needs compute capability": "code",
    "no GPU code": "code",
}


def parse_image(text: str) -> Image:
    """Read `sm_90a` or `compute_90@8.8`, with an ISA after PTX."""
    kind, rest = text.split("_")
    name, _, isa = rest.partition("@")
    digits, suffix = name.rstrip("af"), name[len(name.rstrip("af")) :]
    assert bool(isa) == (kind == "compute")
    return Image((int(digits[:-1]), int(digits[-1])), suffix, isa)


def make_foreign(name: str, images: str, toolkit: str = "", **properties: Any) -> Library:  # noqa: ANN401
    """Return a library of another project."""
    return Library(name, tuple(map(parse_image, images.split())), toolkit, **properties)


FOREIGN: Final = (
    make_foreign("nothing", ""),
    make_foreign("turing", "sm_75", "11.8"),
    make_foreign("ampere-hopper", "sm_80 sm_90", "12.4"),
    make_foreign("ada", "sm_86 sm_89", "12.4"),
    make_foreign("hopper-specific", "sm_90a", "12.4"),
    make_foreign("b200-geforce", "sm_100 sm_120", "12.8"),
    make_foreign("blackwell-family", "sm_100f", "12.9"),
    make_foreign("b300-family", "sm_103f", "12.9"),
    make_foreign("blackwell-specific", "sm_100a", "12.8"),
    make_foreign("geforce", "sm_120", "12.8"),
    make_foreign("geforce-family", "sm_120f", "12.9"),
    make_foreign("spark-specific", "sm_121a", "12.9", machine="aarch64"),
    make_foreign("orin", "sm_87", "11.4", machine="aarch64"),
    make_foreign("thor", "sm_110", "13.0", machine="aarch64"),
    make_foreign("thor-by-its-first-name", "sm_101 compute_101f@8.8", "12.9", machine="aarch64"),
    make_foreign("rubin", "sm_100f compute_107@9.4", "12.9"),
    make_foreign("ptx-old", "compute_75@6.3"),
    make_foreign("ptx-new", "compute_90@9.4"),
    make_foreign("ptx-specific", "compute_90a@8.0"),
    make_foreign("ptx-family", "compute_100f@8.8"),
    make_foreign("volta", "sm_70 compute_70@6.3", "10.0"),
    make_foreign("ampere-ptx", "sm_86 compute_86@7.8", "11.8"),
    make_foreign("newest-minor", "sm_90 compute_90@8.8", "12.9"),
    make_foreign("of-cuda-13", "sm_80 compute_80@9.0", "13.0"),
    make_foreign("of-cuda-13-5", "sm_90 compute_90@9.5", "13.5"),
    make_foreign("ptx-of-cuda-13-5", "compute_75@9.5"),
    make_foreign("ptx-in-no-document", "compute_90@9.9"),
    make_foreign("rubin-specific", "sm_107a", "13.5"),
    make_foreign("rubin-family", "sm_107f compute_107f@9.5", "13.5"),
    make_foreign("tile", "sm_100a sm_120a", "13.5", of_tile=True),
    make_foreign("zstd", "sm_80 sm_90 compute_90@8.7", "12.8", codec="zstd"),
)


def read_sets() -> tuple[Library, ...]:
    """Return the published sets from their file; `+PTX` has PyTorch's meaning."""
    sets = json.loads((ROOT / "flash_dist" / "archsets.json").read_text("utf-8"))["set"]
    return tuple(_read_set(name, one) for name, one in sets.items())


def _read_set(name: str, one: dict[str, Any]) -> Library:
    images = []
    for arch in one["archs"].split(";"):
        target, plus, _ = arch.partition("+")
        number, suffix = parse_number(target.rstrip("af")), target[len(target.rstrip("af")) :]
        images.append(Image(number, suffix))
        if plus:
            images.append(Image(number, suffix, write_isa(one["toolkit"])))
    machine = one.get("machine", "x86_64")
    return Library(name, tuple(images), one["toolkit"], machine=machine)


def write_library(folder: Path, one: Library) -> Path:
    """Write a published set as our own wheel, anything else as another project's library."""
    archset = next((found for found in published_sets() if found.name == one.name), None)
    if archset is None:
        path = folder / f"{one.name}.so"
        path.write_bytes(
            library(container(*(_make_entry(image, one, "x") for image in one.images)))
        )
        return path
    symbols = {
        (arch.number, arch.suffix, arch.ptx): [
            variant.symbol
            for variant in make_variants(arch)
            if variant.key[1:] == (("fp16",), (64, 64))
        ]
        for arch in archset.archs
    }
    code = library(
        b"".join(container(_make_entry(image, one, *symbols[_tell(image)])) for image in one.images)
    )
    path = folder / f"flash_dist-0.1.0+{one.name}.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("flash_dist/_build.json", make_manifest(archset, "0.1.0").to_text())
        wheel.writestr("flash_dist/libflash_dist_kernels.so", code)
    return path


def _tell(image: Image) -> tuple[int, str, bool]:
    return 10 * image.number[0] + image.number[1], image.suffix, bool(image.isa)


def _make_entry(image: Image, one: Library, *names: str) -> bytes:
    number, suffix, is_ptx = _tell(image)
    if is_ptx:
        text = ptx(*names, target=f"sm_{number}{suffix}", version=image.isa)
        isa = parse_number(image.isa)
        return entry(PTX, number, text, suffix=suffix, isa=isa, codec=one.codec)
    major, minor = parse_number(one.toolkit)
    code = cubin(*(Kernel(name, cuda=10 * major + minor) for name in names))
    abi = (1, 8) if major >= 13 or (number >= 100) else (1, 7)
    if one.of_tile:
        return entry(SASS, number, code, isa=abi, codec=one.codec, compat=FOR_ONE_CHIP)
    return entry(SASS, number, code, suffix=suffix, isa=abi, codec=one.codec)


@dataclass(frozen=True)
class Answer:
    """Doctor's answer for a library on one GPU."""

    how: str
    said: str

    @property
    def obstacle(self) -> str:
        """Return the rule that the answer's sentence names; empty if the code runs."""
        found = (rule for words, rule in OBSTACLES.items() if words in self.said)
        return next(found, "unexplained") if self.how == "no" else ""


def ask(
    path: Path, gpus: Sequence[Number], driver: int, variables: dict[str, str]
) -> tuple[int, list[Answer]]:
    """Return the exit status of `doctor`, and its answer for each GPU."""
    command = ["doctor", "--wheel", str(path), "--driver", str(driver), "--json"]
    command += ["--gpu", ",".join(f"{major}.{minor}" for major, minor in gpus)]
    for name, value in variables.items():
        command += ["--env", f"{name}={value}"]
    with redirect_stdout(StringIO()) as told:
        status = main(command)
    checks = json.loads(told.getvalue())["checks"]
    found = {check["gpu"]: check for check in checks if check["gpu"] is not None}
    whole = " ".join(check["summary"] for check in checks if check["gpu"] is None)
    return status, [_read_answer(found.get(index), whole) for index in range(len(gpus))]


def choose(gpus: Sequence[Number], driver: int, machine: str) -> str | None:
    """Return the set that `select` names, None if it names none."""
    command = ["select", "--driver", str(driver), "--machine", machine, "--json"]
    command += ["--gpu", ",".join(f"{major}.{minor}" for major, minor in gpus)]
    with redirect_stdout(StringIO()) as told:
        main(command)
    chosen = json.loads(told.getvalue())["chosen"]
    return str(chosen["name"]) if chosen else None


def _read_answer(check: dict[str, Any] | None, whole: str) -> Answer:
    if check is None:
        return Answer("no", whole)
    return Answer(HOW[check["data"]["how"]], f"{check['id']}: {check['summary']}")
