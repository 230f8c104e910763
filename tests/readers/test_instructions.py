"""Bodies of kernels are measured and judged as in NVIDIA's own nvdisasm."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.gpucode.fatbin import open_fatbin
from flash_dist.toolkit.gpucode.sass import MAX_SCANNED_BYTES, WORD_SIZE, Body
from flash_dist.toolkit.targets.archs import Arch
from tests.readers.planted import SOURCE
from tests.readers.tools import compile_code, gencode, needs, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("nvcc", "nvdisasm")

MEMORY = {
    *("LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "REDG", "LDGSTS"),
    *("UTMALDG", "UTMASTG"),
}
TARGETS = ("sm_75", "sm_80", "sm_89", "sm_90a", "sm_100", "sm_120")
_LABEL = re.compile(r"^\.text\.([\w$]+):$")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?PT?[0-9]*\s+)?([A-Z][\w.]*)")


def disassemble(cubin: Path) -> dict[str, list[str]]:
    """Return the mnemonics of each kernel."""
    found: dict[str, list[str]] = {}
    mnemonics: list[str] = []
    for line in run("nvdisasm", "-c", cubin).splitlines():
        if (label := _LABEL.match(line)) is not None:
            mnemonics = found.setdefault(label[1], [])
        elif (instruction := _INSTRUCTION.match(line)) is not None:
            mnemonics.append(instruction[1])
    return found


def describe(name: str, mnemonics: list[str], body: Body) -> Body:
    """Derive from mnemonics what we derive from bytes; copy facts that are only in `.nv.info`."""
    if len(mnemonics) * WORD_SIZE > MAX_SCANNED_BYTES:
        return Body(name, len(mnemonics))
    length = len(mnemonics)
    while mnemonics[length - 1] == "NOP":
        length -= 1
    families = {mnemonic.split(".")[0] for mnemonic in mnemonics}
    return Body(
        name,
        length - 1 if mnemonics[length - 1] == "BRA" else length,
        prints=body.prints,
        asserts=body.asserts,
        traps="BPT.TRAP" in mnemonics,
        calls="CALL" in families,
        uses_memory=not MEMORY.isdisjoint(families),
    )


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the planted kernels for a target of each generation."""
    folder = tmp_path_factory.mktemp("planted")
    return compile_code(folder / "planted.fatbin", SOURCE, "-fatbin", *gencode(*TARGETS))


@pytest.mark.parametrize("target", TARGETS)
def test_bodies_are_what_the_disassembler_prints(
    tmp_path: Path, planted: Path, target: str
) -> None:
    cubin = tmp_path / "planted.cubin"
    with open_fatbin(planted) as fatbin:
        (entry,) = fatbin.report.select(Arch.parse(target))
        cubin.write_bytes(fatbin.payload(entry))
        bodies = fatbin.bodies(entry)
    printed = disassemble(cubin)
    assert set(printed) == {body.name for body in bodies}
    assert bodies == tuple(describe(body.name, printed[body.name], body) for body in bodies)
