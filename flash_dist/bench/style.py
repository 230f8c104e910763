"""Style of figures: colours, sizes and file formats. An SVG adapts to the viewer's dark mode."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any, Final

from .baselines.names import OURS, OURS_DETERMINISTIC, PLAIN

if TYPE_CHECKING:
    from pathlib import Path

WIDTH: Final = 9.06  # largest width in inches: 870 CSS pixels, as wide as our pages
TEXT: Final = 7.5  # smallest font size in points: 10 CSS pixels

_BACKGROUND: Final = "#ffffff"
_INK: Final = "#222222"
NOTE: Final = "#555555"
_GRID: Final = "#dddddd"

# Okabe and Ito's colour-blind safe palette, and more colours. On a dark page, DARK replaces
# the darkest colours, such as that of OURS.
COLOURS: Final = {
    OURS: "#1a1a1a",
    OURS_DETERMINISTIC: "#7a7a7a",
    PLAIN: "#a8a8a8",
    "sdpa-flash": "#56b4e9",
    "sdpa-flash-deterministic": "#0072b2",
    "sdpa-cudnn": "#009e73",
    "sdpa-efficient": "#f0e442",
    "sdpa-efficient-deterministic": "#e69f00",
    "fa4": "#661100",
    "fa4-deterministic": "#b35a3c",
    "fa3": "#332288",
    "fa3-deterministic": "#9a8fd1",
    "cudnn-flex": "#117733",
    "cudnn-flex-deterministic": "#88ccaa",
    "flex": "#d55e00",
    "eager": "#cc79a7",
}

# Colours that are replaced on a dark page, and their replacements.
DARK: Final = {
    _BACKGROUND: "#0d1117",
    _INK: "#e6edf3",
    NOTE: "#a3adb8",
    _GRID: "#30363d",
    COLOURS[OURS]: "#f5f5f5",
    "#661100": "#c2553f",
    "#332288": "#7d6fe0",
    "#117733": "#3da864",
}

STYLE: Final[dict[str, Any]] = {
    "figure.facecolor": _BACKGROUND,
    "font.size": 8,
    "text.color": _INK,
    "axes.facecolor": "none",
    "axes.titlesize": 9,
    "axes.titlecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "xtick.bottom": False,
    "ytick.color": _INK,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",  # keep text as text: small, searchable, in the reader's font
    "svg.hashsalt": "flash_dist",  # the same results give the same file
}
# matplotlib's default font, with which the widths of texts are measured. Viewers without this font
# use Verdana, which is about as wide.
_FONTS: Final = "'DejaVu Sans', Verdana, sans-serif"


def save_figure(figure: Any, path: Path) -> None:  # noqa: ANN401 - matplotlib
    """Write a figure in the format that the suffix names.

    An SVG has two colour schemes, and no date.
    """
    if path.suffix != ".svg":
        figure.savefig(path)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date")))
    path.write_text(add_style_sheet(drawn.getvalue()), encoding="utf-8")


def add_style_sheet(svg: str) -> str:
    """Return the SVG with a style sheet: the fonts, and other colours for viewers in dark mode."""
    rules = "".join(
        f'[style*="{name}: {light}"] {{ {name}: {dark} !important }}\n'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
        if f"{name}: {light}" in svg
    )
    sheet = f"text {{ font-family: {_FONTS} }}\n"
    sheet += f"@media (prefers-color-scheme: dark) {{\n{rules}}}\n"
    svg = re.sub(r"font-family: [^;\"]*; ?", "", svg)
    svg = re.sub(r' transform="rotate\(-0 [^"]*\)"', "", svg)
    svg = re.sub(r" <metadata>.*?</metadata>\n", "", svg, flags=re.DOTALL)
    return svg.replace(" <defs>", f" <style>\n{sheet}</style>\n <defs>", 1)
