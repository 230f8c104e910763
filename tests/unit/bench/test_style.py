"""The look of figures. The figures of the pages agree with the results that they show."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from flash_dist.bench.baselines.names import OURS, PASSES, PEERS
from flash_dist.bench.labels import label_baseline
from flash_dist.bench.plot import choose_bars, choose_baselines
from flash_dist.bench.results import read_report
from flash_dist.bench.style import COLOURS, DARK, WIDTH, add_style_sheet

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"
SVG = "{http://www.w3.org/2000/svg}"
PIXELS_PER_INCH = 96
SMALLEST_PIXELS = 10
COLUMN_PIXELS = 870


def read_figure(name: str) -> ET.Element:
    return ET.fromstring((ROOT / "docs" / name).read_bytes())  # noqa: S314 - our own


def find_texts(figure: ET.Element) -> list[str]:
    return [one.text or "" for one in figure.iter(f"{SVG}text")]


@pytest.mark.parametrize("name", ["speed.svg", "decoding.svg"])
def test_the_text_of_a_figure_can_be_read_in_a_column_of_a_page(name: str) -> None:
    figure = read_figure(name)
    width = float(figure.attrib["width"].removesuffix("pt"))
    scale = COLUMN_PIXELS / width
    texts = list(figure.iter(f"{SVG}text"))
    sizes = [re.findall(r"font-size: ([\d.]+)px", one.attrib["style"])[0] for one in texts]
    assert min(map(float, sizes)) * scale >= SMALLEST_PIXELS - 0.01
    assert width <= WIDTH * 72 + 0.01


@pytest.mark.parametrize("name", ["speed.svg", "decoding.svg"])
def test_a_figure_follows_the_dark_mode_of_its_reader(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    assert "@media (prefers-color-scheme: dark)" in text
    drawn = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text.split("</style>", 1)[1]))
    assert drawn <= {*DARK, *COLOURS.values()}, "a colour without a dark one beside it"


def test_the_figure_of_speed_has_the_rates_of_the_results() -> None:
    report = read_report(RESULTS / "h200-paper.json")
    names = choose_baselines(report.baselines)
    rates = [
        f"{row.teraflops(name, pass_):.0f}"
        for row in report.rows
        if not row.eager
        for pass_ in PASSES[:2]
        for name in choose_bars(names, pass_)
    ]
    texts = find_texts(read_figure("speed.svg"))
    for rate in set(rates):
        assert texts.count(rate) >= rates.count(rate), "`nox -s outputs` draws it again"
    assert {label_baseline(name, report.machine) for name in names} <= set(texts)


def test_the_figure_of_decoding_has_the_shares_of_the_results() -> None:
    recorded = json.loads((RESULTS / "h200-decoding.json").read_text(encoding="utf-8"))
    shares = [f"{share:.2f}" for row in recorded["rows"] for share in row["shares"].values()]
    texts = find_texts(read_figure("decoding.svg"))
    for share in set(shares):
        assert texts.count(share) >= shares.count(share), "benchmarks/decoding.py draws it again"
    assert label_baseline("sdpa-cudnn", recorded["machine"]) in texts


def test_every_baseline_has_a_colour_of_its_own() -> None:
    named = [COLOURS[name] for name in (OURS, *PEERS) if name in COLOURS]
    assert len(set(named)) == len(named)


def test_a_style_sheet_replaces_only_colours_that_are_drawn() -> None:
    styled = add_style_sheet('<svg>\n <defs>\n </defs>\n<path style="fill: #222222"/></svg>')
    assert '[style*="fill: #222222"] { fill: #e6edf3 !important }' in styled
    assert "stroke:" not in styled
    assert styled.index("<style>") < styled.index("<defs>")
