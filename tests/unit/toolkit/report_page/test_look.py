"""A reader's view of the report: colours that claim only what was checked, units, one table."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.doctor.examine import Examination, examine
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.report_page import make_page
from flash_dist.toolkit.report_page.checks import group_checks
from flash_dist.toolkit.report_page.facts import make_facts
from flash_dist.toolkit.report_page.markup import prose
from flash_dist.toolkit.report_page.page import colour, conclude
from flash_dist.toolkit.report_page.style import STYLE
from flash_dist.toolkit.targets.wording import format_memory
from tests.unit.made.builds import ALL, HOPPER, Passes, make_environment, make_what_if
from tests.unit.made.scenarios import (
    AMPERE,
    SCENARIOS,
    TURING,
    make_machine,
)
from tests.unit.toolkit.report_page.test_page import Page, failing
from tests.unit.toolkit.test_redaction import ALICE

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import Environment
    from flash_dist.toolkit.machine.libcuda import Gpu

SIX = tuple(("NVIDIA H200", "9.0", f"0000:{bus:02x}:00.0") for bus in range(1, 7))


def document(environment: Environment, selftest: Any = None) -> dict[str, Any]:  # noqa: ANN401
    return Examination(environment, tuple(examine(environment, selftest=selftest))).to_json()


def write(environment: Environment, selftest: Any = None) -> str:  # noqa: ANN401
    told = document(environment, selftest)
    return make_page(told, ALICE, version="0.1.0", written="2026-01-05 10:00 UTC")


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_verdict_is_green_only_where_a_gpu_was_found_good(name: str) -> None:
    told = document(SCENARIOS[name].environment)
    good = {"gpu"} & {check["name"].split()[0] for check in told["checks"] if check["gpu"] == 0}
    assert colour(told) in {"ok", "warn", "fail", "skip"}
    if colour(told) == "ok":
        assert (told["exit_code"], bool(good)) == (0, True)
    assert (colour(told) == "fail") == (told["exit_code"] == 1)


@pytest.mark.parametrize(
    ("name", "style"),
    [("no GPU and no driver", "skip"), ("all GPUs hidden", "warn")],
)
def test_nothing_checked_is_grey_or_amber_and_says_what_to_do(name: str, style: str) -> None:
    text = write(SCENARIOS[name].environment)
    assert f'class="verdict {style}"' in text
    assert "What to do" in text
    assert "Nothing could be checked" in text


def test_no_check_at_all_is_no_success() -> None:
    told = {**document(make_environment(ALL, "9.0")), "checks": []}
    assert (colour(told), conclude(told)) == ("skip", "Nothing was checked")


def test_a_check_that_was_not_run_is_counted_in_the_verdict() -> None:
    environment = SCENARIOS["a sound machine"].environment
    told = document(environment, Skips())
    assert conclude(told) == "No failure, 2 checks not run"


class Skips(Passes):
    """A selftest that does not run."""

    def run(self, gpu: Gpu) -> CheckResult:
        return CheckResult("skip", f"not run on {gpu.name}")


class Takes(Passes):
    """A selftest that takes longer on each GPU than on the one before."""

    def run(self, gpu: Gpu) -> CheckResult:
        return CheckResult("ok", f"bit-equal ({20 + gpu.index} s)")


def test_six_equal_gpus_are_one_entry_and_one_row_each_of_one_table() -> None:
    one, six = write(make_machine(ALL, SIX[0]), Takes()), write(make_machine(ALL, *SIX), Takes())
    for tag in ("<table>", "<li ", "<h3>", "<details>"):
        assert one.count(tag) == six.count(tag)
    rows = [text.count("<tr>") for text in (one, six)]
    assert rows[1] - rows[0] == 5
    text = Page(six).text
    assert "gpu 0-5 NVIDIA H200 (compute capability 9.0), 24 GiB" in text
    assert "selftest 0-5 bit-equal (20 to 25 s)" in text
    assert "5 5 NVIDIA H200 9.0 24 GiB 82 0000:06:00.0" in text


def test_gpus_with_different_results_have_separate_entries() -> None:
    told = document(make_machine(ALL, SIX[0], AMPERE, TURING), Passes())
    groups = group_checks(told["checks"])
    assert len(groups) == len(told["checks"])


def test_findings_with_the_same_fix_share_an_entry() -> None:
    text = Page(write(make_machine(HOPPER, TURING, AMPERE))).text
    steps = text[text.index("What to do") : text.index("GPUs and kernels")]
    assert steps.count("no matching code") == 2
    assert steps.count("Fix:") == 1


def test_facts_of_a_machine_have_words_and_units() -> None:
    environment = SCENARIOS["a full disk below the JIT cache"].environment
    written = make_facts(document(environment)["environment"])
    facts = Page(written).text
    for part in (
        "Machine Operating system Debian",
        "1 MiB free, holds at most 1 GiB",
        "memory SMs",
        "24 GiB",
        "Kernel module 580.65.06, which drives 1 GPU ",
        "Loads yes",
    ):
        assert part in facts
    assert not [name for name in re.findall(r"<dt>([^<]*)", written) if "_" in name]
    assert not re.search(r"\b[0-9]{9,}\b", facts)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_fact_of_a_scenario_has_a_place(name: str) -> None:
    told = document(SCENARIOS[name].environment)["environment"]
    assert "Also" not in make_facts(told)


def test_facts_of_a_later_version_are_shown_unchanged() -> None:
    told = document(make_environment(ALL, "9.0"))["environment"]
    text = Page(make_facts({**told, "free_threaded": True, "mounts": [{"path": "/x"}]})).text
    assert "Also free threaded yes mounts 0 path /x" in text


def test_a_reason_stands_beside_what_it_is_the_reason_of() -> None:
    assert (
        "Driver none: libcuda.so.1 was not found"
        in Page(write(SCENARIOS["no GPU and no driver"].environment)).text
    )
    text = Page(write(failing())).text
    assert "Loads no: extension: ~/venv/lib" in text
    assert "GPU 0: sm_90a runs only on compute capability 9.0, not 8.6" in text
    table = text[text.index("GPUs and kernels") : text.index("Checks")]
    assert "GPU 2: sm_90a runs only on compute capability 9.0, not 12.0" in table


def test_hidden_gpus_and_instances_are_in_the_table() -> None:
    text = Page(write(SCENARIOS["a hidden GPU"].environment)).text
    assert "0 1 NVIDIA GeForce RTX 3090 8.6 24 GiB 82" in text
    assert "hidden 0 NVIDIA GeForce RTX 2080 Ti 7.5" in text
    assert (
        "in MIG mode: NVIDIA A100-SXM4-40GB MIG 1g.5gb (MIG-0111)"
        in Page(write(SCENARIOS["MIG"].environment)).text
    )


def test_a_variable_that_is_set_to_nothing_is_reported() -> None:
    text = Page(write(SCENARIOS["all GPUs hidden"].environment)).text
    assert "Variables CUDA_VISIBLE_DEVICES set to nothing" in text


def test_a_what_if_says_that_the_machine_is_where_it_was_asked() -> None:
    assert "Environment Asked on Operating system" in Page(write(make_what_if(ALL, "7.5"))).text


def test_options_in_code_do_not_break_after_their_dashes() -> None:
    long = f"--{'x' * 60}"
    assert prose("`pip --no-deps x`") == ('<code>pip <span class="whole">--no-deps</span> x</code>')
    assert prose(f"`{long}`") == f"<code>{long}</code>"


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (2048, "2 KiB"), (47_889_000_000, "44.6 GiB"), (100 << 30, "100 GiB")],
)
def test_memory_is_told_in_powers_of_two(size: int, text: str) -> None:
    assert format_memory(size) == text


@pytest.mark.parametrize(
    "environment", [failing(), make_machine(ALL, *SIX)], ids=["failing", "six"]
)
def test_the_page_can_be_read_aloud(environment: Environment) -> None:
    text = write(environment, Passes())
    levels = [int(level) for level in re.findall(r"<h([1-6])", text)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert '<html lang="en">' in text
    assert "<th>" not in text
    assert len(re.findall(r"<th scope=", text)) == text.count("<th ") > 0
    assert text.count("<main>") == 1


def test_wide_tables_scroll_and_paper_shows_all_of_them() -> None:
    assert re.search(r"\.scroll \{ overflow-x: auto;", STYLE)
    printed = STYLE[STYLE.index("@media print") :]
    assert ".scroll { overflow: visible; }" in printed
    assert "details::details-content" in printed


def read_colours(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    """Compute WCAG 2.2's relative luminance."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


_MARKS = ("ok", "warn", "fail", "skip", "jit")
_PAIRS = [
    *[(text, back) for text in ("text", "dim", "link") for back in ("back", "card")],
    *[(mark, "back") for mark in _MARKS],
    *[(text, f"{mark}-back") for mark in _MARKS for text in (mark, "text", "dim")],
]


@pytest.mark.parametrize("medium", ["light", "dark", "print"])
def test_every_text_has_the_contrast_of_wcag_aa(medium: str) -> None:
    light, _, rest = STYLE.partition("@media (prefers-color-scheme: dark)")
    dark, _, paper = rest.partition("@media print")
    block = {"light": light, "dark": dark, "print": paper}[medium]
    colours = read_colours(block)
    weak = {
        pair: round(ratio, 2)
        for pair in _PAIRS
        if (ratio := contrast(colours[pair[0]], colours[pair[1]])) < 4.5
    }
    assert weak == {}
