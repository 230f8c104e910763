"""Finds GPUs by common names: `RTX 3090`, `h200`, `sm_86`, and the names that drivers report.

Source: NVIDIA's "CUDA GPU Compute Capability" pages, including the page of legacy GPUs.
"""

from __future__ import annotations

import difflib
import re
from typing import Final

from ..errors import ArchError
from .devices import Device

# Words that do not affect the compute capability: brand, form factor, memory.
_NOISE: Final = re.compile(
    r"nvidia|geforce|tesla|gpu|nvgpu|laptop|mobile|max|q|pcie|sxm\d?|nvl|hbm\d?e?|gddr\d\w*|\d+gb?"
    r"|edition|workstation|server|generation|gen|founders|super|ti|hgx|developer|kit|module|card"
)
_GLUED: Final = re.compile(
    r"^(?:nvidia|geforce|tesla)|(?:super|ti|laptop|mobile|maxq|sxm\d?|pcie)+$"
)

# Patterns of product names, without the words of _NOISE and without blanks, by compute capability.
# A product matches only one pattern.
_PRODUCTS: Final[dict[str, str]] = {
    "3.5": r"k40[cmt]?|k20x?c?m?",
    "3.7": r"k80",
    "5.0": r"gtx7(45|50)|m10",
    "5.2": r"gtx9[5-8]0|(gtx)?titanx|m(4|6|40|60)",
    "5.3": r"(jetson)?(nano|tx1)",
    "6.0": r"p100|(quadro)?gp100",
    "6.1": r"gtx10[5-8]0|gt10[13]0|titanxp|p(4|6|40)",
    "6.2": r"(jetson)?tx2",
    "7.0": r"v100[sn]?|titanv|(quadro)?gv100",
    "7.2": r"(jetson)?(agx)?xavier(nx)?",
    "7.5": r"rtx20[678]0|gtx16[3-6]0|titanrtx|quadrortx[34568]000|rtx8000|t4g?|mx[45]50"
    r"|(quadro)?t(400|500|550|600|1000|1200|2000)",
    "8.0": r"a(30x?|100x?|800)",
    "8.6": r"rtx(2050|30[5-9]0)a?|mx570a?|a(2|10[gm]?|16|40)"
    r"|(rtx)?a(400|500|1000|2000|3000|4000|4500|5000|5500|6000)",
    "8.7": r"(jetson)?(agx)?orin(nx|nano)?",
    "8.9": r"rtx40[5-9]0d?|l(2|4|20|40[gs]?)"
    r"|(rtx)?(500|1000|2000|3000|3500|4000|4000sff|4500|5000|5880|6000)(sff)?ada",
    "9.0": r"h(20|100|200|800)|gh(100|200)",
    "10.0": r"g?b(100|200)",
    "10.3": r"g?b300",
    "10.7": r"rubin",
    "11.0": r"(jetson)?(agx)?thor|(jetson)?t[45]000",
    "12.0": r"rtx50[5-9]0(d(v2)?)?|rtxpro(500|[12345]000|4500|6000)(sff)?d?(blackwell)?",
    "12.1": r"(dgx)?spark|gb10",
}
_SEVERAL: Final = {  # names that GPUs of different compute capabilities share
    f"rtx{number}": (f"Quadro RTX {number}", f"RTX {number} Ada")
    for number in (3000, 4000, 5000, 6000)
}
_EXAMPLES: Final = (
    *("A2", "A10", "A16", "A30", "A40", "A100", "B200", "B300", "GB10", "GB200", "GB300", "GH200"),
    *("H20", "H100", "H200", "L4", "L40", "L40S", "T4", "V100", "RTX 2060", "RTX 2070", "RTX 2080"),
    *("RTX 3050", "RTX 3060", "RTX 3070", "RTX 3080", "RTX 3090", "RTX 4060", "RTX 4070"),
    *("RTX 4080", "RTX 4090", "RTX 5060", "RTX 5070", "RTX 5080", "RTX 5090", "GTX 1080"),
    *("GTX 1650", "RTX A6000", "RTX 6000 Ada", "RTX PRO 6000", "Jetson Orin", "Jetson Thor"),
    "DGX Spark",
)
_TARGET: Final = re.compile(
    r"(?:sm_?|compute_?)?([1-9][0-9]?)([0-9])[af]?|([1-9][0-9]?)\.([0-9])[af]?"
)


def find_device(text: str) -> Device:
    """Return the GPU for a name: `8.6`, `sm_86`, `86`, `RTX 3090`, `NVIDIA H100 80GB HBM3`.

    Raises:
        ArchError: No GPU has this name, or GPUs of different compute capabilities have it.
    """
    name = text.strip().lower()
    found = _read_number(name) or _find_product(name)
    if found is not None:
        return found
    message = f"a GPU looks like `8.6`, `sm_86` or `RTX 3090`, got `{text:.60}`"
    raise ArchError(message, hint=_suggest(name))


def _read_number(name: str) -> Device | None:
    match = _TARGET.fullmatch(name)
    if match is None:
        return None
    major, minor = match.group(1, 2) if match[1] else match.group(3, 4)
    device = Device(int(major), int(minor))
    return None if name.isdecimal() and not device.known else device


def _find_product(name: str) -> Device | None:
    short = _shorten(name)
    if short in _SEVERAL:
        first, second = _SEVERAL[short]
        message = f"`{name:.60}` may be `{first}` (7.5) or `{second}` (8.9)"
        raise ArchError(message, hint=f"name one of the two: `--gpu '{second}'`")
    rows = (key for key, pattern in _PRODUCTS.items() if re.fullmatch(pattern, short))
    number = next(rows, None)
    return Device.parse(number) if number else None


def _shorten(name: str) -> str:
    """Join the words that identify a GPU: `rtx3090` for `nvidia geforce rtx 3090 ti`."""
    words = (word for word in re.split(r"[^a-z0-9]+", name) if not _NOISE.fullmatch(word))
    return _GLUED.sub("", "".join(words))


def _suggest(name: str) -> str:
    known = {re.sub("[^a-z0-9]", "", one.lower()): one for one in _EXAMPLES}
    near = difflib.get_close_matches(_shorten(name), known, n=1, cutoff=0.75)
    number = [one for one in known if one.lstrip("artgx") == _shorten(name)]
    found = [*number, *near]
    if found:
        return f"did you mean `{known[found[0]]}`?"
    return "`nvidia-smi --query-gpu=compute_cap --format=csv` lists the compute capability of yours"
