"""Output of `explain`, and its input in the forms that users have."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.findings.explain import explain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.unit.made.command import Cli

ROOT = Path(__file__).parents[4]
XFORMERS = (
    "FATAL: kernel `fmha_cutlassF_f16_aligned_64x128_rf_sm80` is for sm80-sm100, but was built "
    "for sm75"
)
LOG = (
    "[1/73] nvcc ...\nptxas: caf\xe9\n"
    "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n"
    "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
    "OSError: libcudnn.so.9: cannot open shared object file: No such file or directory\n"
)


def read_from_stdin(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_the_stub_of_xformers_is_explained_with_its_own_numbers(cli: Cli) -> None:
    out = cli("explain", XFORMERS).out
    assert "fmha_cutlassF_f16_aligned_64x128_rf_sm80 was compiled for sm_75" in out
    assert "from sm_80 to below sm_100" in out
    assert f"\nfix: {FINDINGS['printf-stub'].remedy}\n" in out


def test_a_symbol_is_named_as_its_source_has_it() -> None:
    (torchs,) = explain("undefined symbol: _ZN3c105ErrorD1Ev")
    (others,) = explain("undefined symbol: cudaLaunchKernelExC")
    assert "`c10::Error::~Error()`" in torchs.summary
    assert "`cudaLaunchKernelExC`" in others.summary


@pytest.mark.parametrize("name", FINDINGS)
def test_an_id_is_explained_by_its_entry_and_nothing_else(name: str) -> None:
    for written in (name, f" `{name}`\n", name.upper(), f"findings.html#{name}"):
        (found,) = explain(written)
        assert found.entry is FINDINGS[name]
        assert found.summary == found.entry.title


def test_the_words_of_a_message_need_no_quotes(cli: Cli) -> None:
    assert "compiled for sm_75" in cli("explain", *XFORMERS.split()).out


def test_a_log_on_stdin_tells_each_cause_once(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    read_from_stdin(LOG.encode("latin-1"), monkeypatch)
    out = cli("explain", "-").out
    first, second = out.split("\n\n")
    missing, no_image = (FINDINGS[name] for name in ("library-missing", "no-kernel-image"))
    assert first.startswith(f"{missing.said.format(library='libcudart.so.12')}\n  ")
    assert second.startswith(f"{no_image.title}\n  ")
    assert out.count("\nfix: ") == 2


def test_json_has_further_causes_in_the_first(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    document = json.loads(cli("explain", "--json", XFORMERS).out)
    assert (document["version"], document["id"], document["also"]) == (1, "printf-stub", [])
    read_from_stdin(LOG.encode("latin-1"), monkeypatch)
    document = json.loads(cli("explain", "-", "--json").out)
    assert document["id"] == "library-missing"
    assert [one["id"] for one in document["also"]] == ["no-kernel-image"]


def test_an_unknown_message_gets_a_next_step(cli: Cli) -> None:
    out, err = cli("explain", "xyzzy\x1b[31m", status=3)
    assert out == ""
    assert err == (
        "this message is not known: xyzzy\\x1b[31m\n\n"
        "hint: `python -m flash_dist doctor` looks for the cause on this machine\n"
    )
    err = cli("explain", "no kernel imgae is availible", status=3).err
    assert err.endswith(
        "\nhint: did you mean\n  `python -m flash_dist explain no-kernel-image`: "
        f"{FINDINGS['no-kernel-image'].title}\n"
    )
    assert len(cli("explain", "--json", "x" * 100_000, status=3).err) < 500


def test_a_file_is_to_be_given_on_stdin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a log.txt"
    path.write_text(LOG)
    assert main(["explain", str(path)]) == 3
    hint = f"`python -m flash_dist explain - < '{path}'` reads the file"
    assert capsys.readouterr().err.endswith(f"\nhint: {hint}\n")
    command = re.sub(r"^python ", f"{sys.executable} ", hint[1:].partition("`")[0])
    done = subprocess.run(["sh", "-c", command], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("argv", [[""], [" ", "\n"], ["-"]], ids=["empty", "blank", "stdin"])
def test_nothing_is_wrong_usage(
    argv: Sequence[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_from_stdin(b" \n", monkeypatch)
    err = cli("explain", *argv, status=2).err
    assert "TEXT must be a message, an id or a log, got nothing" in err


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_on_a_terminal_lines_are_folded_between_words_and_commands_are_whole(columns: int) -> None:
    printed = run_on_a_terminal(["explain", XFORMERS], columns)
    lines = [line.rstrip() for line in printed.splitlines()]
    entry = FINDINGS["printf-stub"]
    assert " ".join(" ".join(lines).split()).endswith(f"{entry.meaning} fix: {entry.remedy}")
    command = "python -m flash_dist inspect --level coverage --kernel NAME FILE"
    assert any(command in line for line in lines)
    for line in lines:
        assert len(line) <= max(min(columns, 100), len(f"  `{command}`"))
    assert sum(line.startswith("fix: ") for line in lines) == 1
    assert all(line.startswith(("the kernel", "  ", "fix: ")) for line in lines[:1] + lines[4:])


def run_on_a_terminal(argv: Sequence[str], columns: int) -> str:
    """Run the module on a terminal of this width; return its text without colours."""
    leader, follower = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm"}
    command = [sys.executable, "-m", "flash_dist", *argv]
    with subprocess.Popen(command, cwd=ROOT, env=environ, stdout=follower) as process:
        os.close(follower)
        parts = []
        while True:
            try:
                part = os.read(leader, 65536)
            except OSError:
                break
            parts.append(part)
        assert process.wait() == 0
    os.close(leader)
    return re.sub(r"\x1b\[[0-9;]*m", "", b"".join(parts).decode())
