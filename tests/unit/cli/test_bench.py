"""`python -m flash_dist bench` as a user meets it, without a GPU."""

from __future__ import annotations

import importlib
import io
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.bench.contenders.names import OURS, OURS_DETERMINISTIC
from flash_dist.bench.contenders.shapes import paper_shapes, seed_shapes
from flash_dist.bench.results import Entry, Report
from flash_dist.cli import main
from flash_dist.cli.terminal.bench_table import print_report
from flash_dist.cli.terminal.results import make_console
from flash_dist.machine.libcuda import Cuda
from flash_dist.machine.torch_install import Torch
from tests.unit.made.bench_results import MACHINE, make_entry, make_report, make_row

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flash_dist.cli.bench.read_cuda", lambda: Cuda("absent", reason="none"))
    monkeypatch.setattr("flash_dist.cli.bench.read_torch", lambda: Torch("ok", "2.13.0", "13.0"))


def render(report: Report) -> str:
    stream = io.StringIO()
    print_report(make_console(stream), report)
    return stream.getvalue()


def test_without_a_gpu_nothing_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench"]) == 3
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "nothing was measured: there is no GPU here (none)\n"


def test_without_torch_nothing_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = Torch("absent", reason="torch is not installed")
    monkeypatch.setattr("flash_dist.cli.bench.read_torch", lambda: absent)
    assert main(["bench"]) == 3
    assert "nothing was measured: torch is not installed\n\nhint: " in capsys.readouterr().err


WRONG = [
    (["--peers", "fa3"], "a peer must be one of sdpa-flash"),
    (["--phases", "sideways"], "a phase must be one of forward"),
    (["--l2", "hot"], "a state of L2 must be one of warm, cold, got `hot`"),
    (["--seconds", "0"], "seconds must be a positive, finite number, got `0`"),
    (["--seconds", "soon"], "seconds must be a positive, finite number, got `soon`"),
    (["--shapes", "mine", "--heads", "8/3"], "num_heads_kv must divide num_heads_q, got `8/3`"),
    (["--shapes", "mine", "--batch", "0"], "a size must be a whole number of at least 1, got `0`"),
    (["--shapes", "mine", "--mask", "tri"], "mask must be one of full, causal"),
    (["--seqlen", "64"], "`--seqlen` goes with `--shapes mine`, got `--shapes paper`"),
    (["--shapes", "all"], "invalid choice"),
    (["--from-json", "absent.json"], "cannot read `absent.json`"),
]


@pytest.mark.parametrize(("argv", "said"), WRONG, ids=lambda x: " ".join(x) if x else "")
def test_wrong_arguments_are_told(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert said in capsys.readouterr().err


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.import_module

    def refuse(name: str, *rest: Any) -> Any:  # noqa: ANN401 - a module
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return found(name, *rest)

    monkeypatch.setattr("importlib.import_module", refuse)
    assert main(["bench", "--plot", "x.png"]) == 2
    err = capsys.readouterr().err
    assert "a plot needs matplotlib, which is not installed" in err
    assert "hint: `python -m pip install matplotlib`" in err


def test_the_paper_table_fits_a_screen_and_names_ratios_and_means() -> None:
    text = render(make_report())
    assert len(text) < 12_000
    first = next(line for line in text.splitlines() if line.startswith("bf16 d64 full 16x1024"))
    assert first.split()[5:] == [
        "0.4581",
        "300",
        "0.91",
        "0.91",
        "2.00",
        "cannot",
        "run",
        "[1]",
        "1024",
    ]
    assert "geometric mean x sdpa-flash: 0.909 of 18 rows, lowest 0.909; d64 full 0.91" in text
    assert "[1] flex: it takes no mask" in text
    assert "deterministic backward: ours, sdpa-flash-deterministic, flex; " in text
    assert "largest difference of sdpa-flash from ours: out 4.0e-03" in text
    assert "kernels of ours: ours_kernel" in text


def test_who_ran_in_torchs_mode_is_said() -> None:
    row = make_row(paper_shapes()[0])
    entries = {OURS_DETERMINISTIC: make_entry(OURS_DETERMINISTIC, row.shape, 200.0), **row.entries}
    text = render(Report(MACHINE, {}, (replace(row, entries=entries),), complete=True))
    assert "x NAME det.: both under torch.use_deterministic_algorithms(True)" in text
    assert (
        "memory: ours-deterministic, sdpa-flash-deterministic; outside of it: ours, sdpa-flash"
    ) in text
    first = next(line for line in text.splitlines() if line.startswith("bf16 d64 full 16x1024"))
    assert first.split()[5:] == ["0.4581", "0.6872", "300", "0.91", "1.33", "1024"]


def test_every_phase_has_its_table() -> None:
    lines = render(make_report()).splitlines()
    titles = ("forward", "backward", "forward + backward")
    assert all(lines.count(title) == 1 for title in titles)
    assert "forward + backward, activation checkpointing" in lines


def test_our_own_failure_is_a_row_and_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = make_row(paper_shapes()[0])
    broken = {**row.entries, OURS: Entry(OURS, reason="RuntimeError: no kernel")}
    row = replace(row, entries=broken, findings=("ours failed on it: RuntimeError: no kernel",))
    path = tmp_path / "run.json"
    path.write_text(json.dumps(Report(MACHINE, {}, (row,), complete=True).to_json()))
    assert main(["bench", "--from-json", str(path)]) == 1
    out = capsys.readouterr().out
    assert "failed [1]" in out
    assert "[1] ours: RuntimeError: no kernel" in out
    assert "[fail]  ours failed on it: RuntimeError: no kernel" in out


def test_a_recorded_run_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(make_report().to_json()))
    assert main(["bench", "--from-json", str(path)]) == 0
    assert capsys.readouterr().out == render(make_report())


def test_states_of_l2_are_told_apart_only_where_there_are_several() -> None:
    shape = seed_shapes()[0]
    both = Report(MACHINE, {}, (make_row(shape, "warm"), make_row(shape, "cold")), complete=True)
    assert f"{shape.name} cold" in render(both)
    one = Report(MACHINE, {}, (make_row(shape, "cold"),), complete=True)
    assert "shape (cold L2)" in render(one)


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
