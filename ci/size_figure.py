"""Draw which parts take the space in each set's wheel, and print a line for each target.

The size of an image is its size in the compressed wheel: nvcc 12.4 compresses images less, but the
compression of the wheel makes up for it. If a SASS image has kernels of several roles, its size is
divided in proportion to the size of their code. Megabytes are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ci.install_tests.sizes import choose
from flash_dist.bench.plot import require_matplotlib
from flash_dist.bench.style import STYLE, TEXT, WIDTH, save_figure
from flash_dist.toolkit.binaries.wheel import open_wheel
from flash_dist.toolkit.builds.contents import read_contents
from flash_dist.toolkit.make.command import command
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from flash_dist.toolkit.builds.contents import Image, WheelContents

PTX, REST = "PTX of all kernels", "Python, host code"
PARTS: Final = {  # colours of Okabe and Ito, in the order of the bars
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "decoding": "#009e73",
    PTX: "#e69f00",
    REST: "#999999",
}
_DARK: Final = {"backward", "decoding"}
_PREFIXES: Final = {"fwd": "forward", "bwd": "backward"}  # roles of decoding have no prefix
_HEIGHT: Final = 0.34  # height of a bar, in inches
_BESIDE: Final = 1.25  # space above and below the bars, in inches
_WRITTEN: Final = 0.35  # smallest part whose size is printed on its bar, in megabytes


def count_bytes(
    contents: WheelContents, libraries: Mapping[str, bytes]
) -> dict[str, dict[str, float]]:
    """Return the megabytes of each part of a wheel by target; the sum is the wheel's size.

    Args:
        contents: The contents of the wheel.
        libraries: The bytes of its libraries, by their names in the wheel.
    """
    roles = {kernel.symbol: kernel.role for kernel in contents.manifest.kernels}
    found: dict[str, dict[str, float]] = {}
    for image in contents.images:
        parts = found.setdefault(str(image.entry.arch), defaultdict(float))
        begin = image.entry.payload_offset
        data = libraries[image.library][begin : begin + image.entry.compressed_size]
        packed = len(zlib.compress(data)) / 1e6
        for part, share in _share(image, roles).items():
            parts[part] += share * packed
    rest = contents.size / 1e6 - sum(sum(parts.values()) for parts in found.values())
    return {**{target: dict(parts) for target, parts in found.items()}, "": {REST: rest}}


def sum_parts(targets: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the megabytes of each part, summed over all targets."""
    return {part: sum(one.get(part, 0.0) for one in targets.values()) for part in PARTS}


def _share(image: Image, roles: Mapping[str, str]) -> dict[str, float]:
    if image.entry.kind == "ptx":
        return {PTX: 1.0}
    code: Counter[str] = Counter()
    for kernel in image.kernels:
        prefix = roles[kernel.name].partition("_")[0]
        code[_PREFIXES.get(prefix, "decoding")] += kernel.code_size or 0
    return {part: size / sum(code.values()) for part, size in code.items()}


def draw(sets: Mapping[str, Mapping[str, float]], plt: Any) -> Any:  # noqa: ANN401 - matplotlib
    """Draw one bar per set, with the first set on top."""
    figure, axis = plt.subplots(figsize=(WIDTH, _BESIDE + _HEIGHT * len(sets)))
    places = range(len(sets))
    begins = [0.0] * len(sets)
    for part, colour in PARTS.items():
        sizes = [one[part] for one in sets.values()]
        axis.barh(places, sizes, 0.7, left=begins, color=colour, label=part)
        for place, begin, size in zip(places, begins, sizes, strict=True):
            if size >= _WRITTEN:
                middle = (begin + size / 2, place)
                ink = "#ffffff" if part in _DARK else "#000000"
                text = {"ha": "center", "va": "center", "fontsize": TEXT, "color": ink}
                axis.annotate(f"{size:.1f}", middle, **text)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    axis.set_yticks(places, [f"{name} {end:.1f}" for name, end in zip(sets, begins, strict=True)])
    axis.invert_yaxis()
    axis.set_xlabel("MB of the wheel")
    figure.legend(loc="upper center", ncols=len(PARTS))
    figure.tight_layout(rect=(0, 0, 1, 0.9))
    return figure


def _count_wheel(path: Path) -> dict[str, dict[str, float]]:
    contents, libraries = read_contents(path), {}
    with open_wheel(path) as wheel:
        for name in contents.libraries:
            with wheel.unpacked(name) as file:
                libraries[name] = bytes(file.read())
    return count_bytes(contents, libraries)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m ci.size_figure", description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="folder of the wheels")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "sizes.svg", metavar="F.svg")
    args = parser.parse_args(argv)
    chosen = choose(find_artefacts(args.dist))
    sets = {one.set_name: _count_wheel(one.path) for one in chosen}
    for name, targets in sets.items():
        for target, parts in targets.items():
            listed = ", ".join(f"{part} {size:.2f} MB" for part, size in parts.items())
            print(f"{name:18} {target:10} {listed}")
    plt = require_matplotlib()
    with plt.rc_context(STYLE):
        figure = draw({name: sum_parts(targets) for name, targets in sets.items()}, plt)
        save_figure(figure, args.out)
        plt.close(figure)
    return 0


if __name__ == "__main__":
    sys.exit(main())
