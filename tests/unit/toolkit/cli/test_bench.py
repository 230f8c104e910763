"""User's view of `python -m flash_dist bench`, without a GPU."""

from __future__ import annotations

import importlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from flash_dist.bench.baselines.names import OURS, OURS_DETERMINISTIC, PASSES, PEERS
from flash_dist.bench.baselines.sets import long_shapes, paper_shapes, seed_shapes
from flash_dist.bench.baselines.shapes import SETS
from flash_dist.bench.calls import SHAPES, Call, CallReport
from flash_dist.bench.command import announce, pick_shapes
from flash_dist.bench.plan import DEFAULTS, Plan
from flash_dist.bench.results import Entry, Report, Row, read_report
from flash_dist.bench.shown.progress import watch
from flash_dist.bench.shown.table import print_report
from flash_dist.toolkit.cli.terminal.results import make_console
from flash_dist.toolkit.machine.libcuda import Cuda
from flash_dist.toolkit.machine.torch_install import Torch
from tests.unit.made.bench_results import MACHINE, make_entry, make_report, make_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flash_dist.bench.baselines.shapes import Shape
    from tests.unit.made.command import Cli


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_dist.bench.command.read_cuda", lambda: Cuda("absent", reason="none"))
    monkeypatch.setattr(
        "flash_dist.bench.command.read_torch", lambda: Torch("ok", "2.13.0", "13.0")
    )


EVERYBODY = (OURS, OURS_DETERMINISTIC, *PEERS)


def make_crowd(shapes: Sequence[Shape]) -> Report:
    """Return results of all baselines on some shapes."""
    rows = [
        Row(shape, "warm", {name: make_entry(name, shape, 300.0) for name in EVERYBODY})
        for shape in shapes
    ]
    return Report(MACHINE, {}, tuple(rows), complete=True)


def render_on_terminal(report: Report, width: int) -> list[str]:
    stream = io.StringIO()
    print_report(Console(file=stream, width=width, force_terminal=True, color_system=None), report)
    return stream.getvalue().splitlines()


def render(report: Report) -> str:
    stream = io.StringIO()
    print_report(make_console(stream), report)
    return stream.getvalue()


def test_without_a_gpu_nothing_is_measured(cli: Cli) -> None:
    out, err = cli("bench", status=3)
    assert out == ""
    assert "no GPU" in err
    assert err.endswith(" (none)\n")
    assert err.count("\n") == 1


def test_without_torch_nothing_is_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Torch("absent", reason="torch is not installed")
    monkeypatch.setattr("flash_dist.bench.command.read_torch", lambda: absent)
    assert "torch is not installed\n\nhint: " in cli("bench", status=3).err


WRONG = [
    (["--peers", "fa5"], ("sdpa-flash", "none", "`fa5`")),
    (["--phases", "sideways"], ("forward, backward", "`sideways`")),
    (["--l2", "hot"], ("L2", "warm, cold", "`hot`")),
    (["--seconds", "0"], ("seconds", "`0`", "`--seconds 0.4`")),
    (["--seconds", "soon"], ("seconds", "`soon`", "`--seconds 0.4`")),
    (["--shapes", "mine", "--heads", "8/3"], ("num_heads_kv", "num_heads_q", "`8/3`")),
    (["--shapes", "mine", "--batch", "0"], ("at least 1", "`0`")),
    (["--shapes", "mine", "--mask", "tri"], ("mask", "full, causal", "`tri`")),
    (["--seqlen", "64"], ("`--seqlen`", "`--shapes mine`", "`--shapes paper`")),
    (["--shapes", "overhead", "--peers", "flex"], ("`--peers`", "`--shapes overhead`")),
    (["--shapes", "overhead", "--only", "d64"], ("`--only`", "`--shapes overhead`")),
    (
        ["--shapes", "overhead", "--seqlen", "64"],
        ("`--seqlen`", "`--shapes mine`", "`--shapes overhead`"),
    ),
    (["--shapes", "all"], ("--shapes", "'all'")),
    (["--only", "d80"], ("`--shapes paper`", "d80`", "d64 full")),
    (["--from-json", "absent.json"], ("`absent.json`", "No such file")),
]


@pytest.mark.parametrize(("argv", "values"), WRONG, ids=" ".join)
def test_wrong_arguments_are_told(argv: list[str], values: tuple[str, ...], cli: Cli) -> None:
    err = cli("bench", *argv, status=2).err
    assert [value for value in values if value not in err] == []


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def refuse(name: str, *rest: Any) -> Any:  # noqa: ANN401 - a module
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr("importlib.import_module", refuse)
    err = cli("bench", "--plot", "x.png", status=2).err
    assert "matplotlib" in err.splitlines()[0]
    assert "hint: `python -m pip install matplotlib`" in err


def test_the_paper_table_fits_a_screen_and_names_ratios_and_means() -> None:
    text = render(make_report())
    assert len(text) < 20_000
    first = next(line for line in text.splitlines() if line.startswith("d64 full 16x1024"))
    assert first.split()[4:] == ["0.4581", "300", "1024", "0.91", "0.91", "2.00", "none", "[1]"]
    assert "geometric mean x FLASH: 0.909 of 42 rows, lowest 0.909; d64 full 0.91" in text
    assert "d128 full h32/8 0.91" in text
    assert "[1] flex: it takes no mask" in text
    assert "deterministic backward: ours, sdpa-flash-deterministic, flex; " in text
    assert "largest difference of sdpa-flash from ours: out 4.0e-03" in text
    assert "kernels of ours: ours_kernel" in text


@pytest.mark.parametrize("width", [80, 120])
def test_a_table_of_everybody_keeps_its_rows_whole_on_a_terminal(width: int) -> None:
    lines = render_on_terminal(make_crowd(paper_shapes()[::7]), width)
    assert max(map(len, lines)) <= width
    tables = [place for place, line in enumerate(lines) if line.startswith("shape (bf16, warm L2)")]
    assert len(tables) > len(PASSES)  # some passes are split into several tables
    for place in tables:
        names = [line.split("  ")[0] for line in lines[place + 1 : place + 7]]
        assert names == [shape.name.removeprefix("bf16 ") for shape in paper_shapes()[::7]]
    heads = " ".join(lines[place] for place in tables[: len(tables) // len(PASSES)]).split()
    assert [heads.count(x) for x in ("ms", "TFLOP/s", "best", "copy")] == [2, 1, 1, 1]  # `ms det.`


def test_long_sequences_are_told_by_their_memory() -> None:
    lines = render(make_crowd(long_shapes()[:2])).splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("peak above the inputs, MiB"))
    assert lines[place].split()[5:8] == ["ours", "det.", "FLASH"]
    sizes = ["1024"] * (len(PEERS) + 1)
    assert lines[place + 2].split() == ["d64", "full", "1x65536", "h16/16", *sizes]
    assert "peak above" not in render(make_crowd(paper_shapes()[:2])).replace("MiB: peak above", "")


def test_what_is_replayed_and_what_is_eager_is_told_apart() -> None:
    row = make_row(paper_shapes()[0])
    entries = {
        name: replace(entry, timings={"forward": replace(entry.timings["forward"], graph=True)})
        for name, entry in row.entries.items()
    }
    entries["sdpa-flash"] = replace(
        entries["sdpa-flash"], timings={}, uncaptured={"forward": "RuntimeError: not permitted"}
    )
    text = render(Report(MACHINE, {}, (replace(row, entries=entries), replace(row, eager=True))))
    (graph,) = (line for line in text.splitlines() if line.startswith("d64 full 16x1024 h32/32 g"))
    assert graph.split()[4:] == ["graph", "0.4581", "300", "1024", "no", "graph", "[1]", "2.00"]
    assert "d64 full 16x1024 h32/32 eager  0.4581" in text
    assert "[1] sdpa-flash: RuntimeError: not permitted" in text
    assert "graph: replayed CUDA graphs, for less than 0.3 ms" in text
    assert "geometric mean" not in text  # a single row


def test_clock_power_and_the_spread_of_rounds_are_said() -> None:
    row = make_row(paper_shapes()[0])
    timing = row.entries[OURS].timings["forward"]
    slow = replace(timing.loops[0], mean_ms=timing.median_ms * 1.2, clock_mhz=1300.0, power_w=None)
    timing = replace(timing, loops=(*timing.loops[:2], slow))
    row = replace(
        row, entries={**row.entries, OURS: row.entries[OURS].with_timing("forward", timing)}
    )
    text = render(Report(MACHINE, {}, (row,)))
    assert "means of loops: SM clock 1300 to 1500 MHz, power 690 to 690 W" in text
    said = "the rounds of 1 time of 12 lie more than 5% apart, at most 20% (ours forward, bf16 d64"
    assert said in text


def test_a_recorded_run_without_loops_says_nothing_of_clocks() -> None:
    path = Path(__file__).parents[4] / "benchmarks" / "results" / "h200-fp32.json"
    text = render(read_report(path))
    assert "SM clock" not in text
    assert "rounds" not in text


PAPER = paper_shapes()


@pytest.mark.parametrize(
    ("words", "count"), [("", 42), ("d96", 6), ("d128 causal h32/8", 3), ("1x16384 h8/1", 2)]
)
def test_only_picks_problems_by_all_words(words: str, count: int) -> None:
    found = pick_shapes(PAPER, words, "paper")
    assert len(found) == count
    assert all(word in shape.name for shape in found for word in words.split())


def test_only_takes_choices() -> None:
    found = pick_shapes(PAPER, "d64 or d128 h16/16 or d256 h8/8", "paper")
    assert found == PAPER[:18]


def test_the_defaults_of_every_set_are_names_of_baselines_passes_and_states() -> None:
    assert set(DEFAULTS) == set(SETS) - {"overhead"}  # `overhead` has its own rules
    for peers, passes, states in DEFAULTS.values():
        assert set(peers) <= set(PEERS)
        assert set(passes) <= set(PASSES)
        assert set(states) <= {"warm", "cold"}
    assert "sdpa-cudnn" in DEFAULTS["paper"][0]


def test_what_will_be_measured_is_announced() -> None:
    plan = Plan(PAPER, ("sdpa-cudnn",), ("forward", "backward"), ("warm",), 0.4)
    first, second = announce(plan, "about 9 min", ("fa4",)).splitlines()
    assert first == "42 rows, forward, backward; ours, sdpa-cudnn: about 9 min"
    assert second.endswith(": fa4")
    assert announce(plan, "about 9 min", ()).endswith("sdpa-cudnn: about 9 min")


def test_in_a_log_each_row_has_a_line_and_what_is_beside_it_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    row = make_row(PAPER[0])
    with watch(2) as (tell, advance):
        tell("under way")
        advance(row)
        advance(replace(row, eager=True))
        advance(row)
    name = PAPER[0].name
    assert capsys.readouterr().err == f"1/2 {name}, warm L2\n2/2 {name}, warm L2\n"


def test_a_quiet_run_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with watch(1, quiet=True) as (_, advance):
        advance(make_row(PAPER[0]))
    assert capsys.readouterr().err == ""


def test_who_ran_in_torchs_mode_is_said() -> None:
    row = make_row(paper_shapes()[0])
    entries = {OURS_DETERMINISTIC: make_entry(OURS_DETERMINISTIC, row.shape, 200.0), **row.entries}
    text = render(Report(MACHINE, {}, (replace(row, entries=entries),), complete=True))
    assert "FLASH det.: both under torch.use_deterministic_algorithms(True)" in text
    assert (
        "memory: ours-deterministic, sdpa-flash-deterministic; outside of it: ours, sdpa-flash"
    ) in text
    first = next(line for line in text.splitlines() if line.startswith("d64 full 16x1024"))
    assert first.split()[4:] == ["0.4581", "0.6872", "300", "1024", "0.91", "1.33"]


def test_every_pass_has_its_table() -> None:
    lines = render(make_report()).splitlines()
    titles = ("forward", "backward", "forward + backward")
    assert all(lines.count(title) == 1 for title in titles)
    assert "forward + backward, activation checkpointing" in lines


def test_our_own_failure_is_a_row_and_a_finding(tmp_path: Path, cli: Cli) -> None:
    row = make_row(paper_shapes()[0])
    broken = {**row.entries, OURS: Entry(OURS, reason="RuntimeError: no kernel")}
    row = replace(row, entries=broken, findings=("ours failed on it: RuntimeError: no kernel",))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(Report(MACHINE, {}, (row,), complete=True).to_json()))
    out = cli("bench", "--from-json", path, status=1).out
    assert "failed [1]" in out
    assert "[1] ours: RuntimeError: no kernel" in out
    assert "[fail]  ours failed on it: RuntimeError: no kernel" in out


def test_a_recorded_run_is_shown_again(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(make_report().to_json()))
    assert cli("bench", "--from-json", path).out == render(make_report())


def test_states_of_l2_are_told_apart_only_where_there_are_several() -> None:
    shape = seed_shapes()[0]
    both = Report(MACHINE, {}, (make_row(shape, "warm"), make_row(shape, "cold")), complete=True)
    assert f"{shape.name.removeprefix('bf16 ')} cold" in render(both)
    one = Report(MACHINE, {}, (make_row(shape, "cold"),), complete=True)
    assert "shape (bf16, cold L2)" in render(one)


def test_a_stack_is_only_in_the_table_of_checkpointing() -> None:
    row = make_row(seed_shapes()[-1])
    only = {
        name: replace(entry, timings={"checkpointed": entry.timings["checkpointed"]})
        for name, entry in row.entries.items()
    }
    text = render(Report(MACHINE, {}, (replace(row, entries=only),), complete=True))
    assert text.count("18 layers") == 1
    assert "(1.0 mem)" in text


def test_a_run_that_ended_early_says_so() -> None:
    assert "incomplete: the run ended" in render(replace(make_report(), complete=False))


@pytest.mark.parametrize(("ratio", "status"), [(1.0, 0), (1.5, 1)], ids=["within", "past"])
def test_what_calls_cost_is_a_table_per_problem_and_past_a_limit_a_finding(
    ratio: float, status: int, tmp_path: Path, cli: Cli
) -> None:
    calls = tuple(Call("operator", shape, 20 * ratio, 20.0) for shape in SHAPES)
    path = tmp_path / "calls.json"
    path.write_text(json.dumps(CallReport(MACHINE, calls).to_json()))
    out = cli("bench", "--from-json", path, status=status).out
    rows = [line.split() for line in out.splitlines() if line.startswith("operator")]
    times = [f"{20 * ratio:.1f}", "20.0", f"{ratio:.2f}"]
    assert rows == [["operator", *times, "1.1"], ["operator", *times, "-"]]
    assert ("[fail]  operator takes 1.50 times as long" in out) == (status == 1)
