"""The C++ program, compiled without torch and CUDA: its command line, its masks, its start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.kernels.budget import DEFAULT_BUDGET_MB
from flash_dist.toolkit.make.project import NATIVE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Run = Callable[..., subprocess.CompletedProcess[str]]

pytestmark = pytest.mark.slow  # compiles the program

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "csrc" / "debug"
TILE = 64

# Replaces run.cpp: prints the arrays of the mask instead of running kernels.
STUB = """
#include <cstdio>
#include "run.h"
namespace flash_dist::debug {
void print(const char* name, const std::vector<int>& array) {
  std::printf("%s", name);
  for (int x : array) std::printf(" %d", x);
  std::printf("\\n");
}
int run(const Options& o) {
  const RowArrays arrays = row_arrays(o.mask, o.seqlen_q, o.seqlen_k);
  print("rows", arrays.rows);
  print("query_ranges", arrays.query_ranges);
  print("key_ranges", arrays.key_ranges);
  print("key_slots", arrays.key_slots);
  print("budget_mb", {static_cast<int>(o.budget_mb)});
  return 0;
}
}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs the program, with its own main and parser."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the parser with")
    folder = tmp_path_factory.mktemp("debug")
    (folder / "stub.cpp").write_text(STUB, encoding="utf-8")
    sources = [str(SOURCES / name) for name in ("main.cpp", "options.cpp", "mask.cpp")]
    program = str(folder / "program")
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(SOURCES), "-o", program]
    subprocess.run([compiler, *flags, *sources, str(folder / "stub.cpp")], check=True)

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *arguments], capture_output=True, text=True, check=False)

    return call


def _options_of(help_text: str) -> set[str]:
    return set(re.findall(r"^  (--[a-z-]+)", help_text, re.MULTILINE))


def test_parse_only_prints_the_call_without_a_gpu(run: Run) -> None:
    done = run("--parse-only", "--seqlen-q", "300", "--num-heads-kv=2", "--head-dim-v", "64")
    assert done.returncode == 0
    assert "q    [2, 300, 8, 128] bf16\n" in done.stdout
    assert "v    [2, 1024, 2, 64]\n" in done.stdout
    assert "mask causal, softmax_scale 0.0883883, seed 0\n" in done.stdout


def test_the_backward_may_use_as_much_memory_as_in_python(run: Run) -> None:
    assert f"\nbudget_mb {DEFAULT_BUDGET_MB}\n" in run("--seqlen", "64").stdout
    assert f"beside its statistics, {DEFAULT_BUDGET_MB}\n" in run("--help").stdout
    assert "\nbudget_mb 7\n" in run("--seqlen", "64", "--budget-mb", "7").stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--dtype f8", "--dtype must be fp16, bf16, fp32 or ieee32, got `f8`"),
        ("--mask diagonal", "block-causal:BLOCKS, got `diagonal`"),
        ("--mask window:5", "--mask window needs two numbers, got `window:5`"),
        ("--mask window:5,x", "RIGHT of --mask must be a whole number from -1 to"),
        ("--mask block-causal:0", "from 1 to 2147483647, got `0`"),
        ("--seqlen 12k", "--seqlen must be a whole number from 1 to 2147483647, got `12k`"),
        ("--batch 99999999999", "--batch must be a whole number"),
        ("--head-dim 100", "--head-dim must be a multiple of 8 from 8 to 512, got 100"),
        ("--head-dim 64 --head-dim-v 72", "from 8 to --head-dim (64), got 72"),
        ("--num-heads-q 6 --num-heads-kv 4", "must divide --num-heads-q (6), got 4"),
        ("--softmax-scale nan", "--softmax-scale must be a positive number, got `nan`"),
        ("--help=yes", "--help takes no value, got `--help=yes`"),
        ("--causal", "unknown option `--causal`"),
        ("--seed", "--seed needs a value, got nothing"),
    ],
)
def test_a_wrong_command_line_is_one_sentence_and_status_2(
    run: Run, arguments: str, sentence: str
) -> None:
    done = run(*arguments.split())
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert sentence in done.stderr


def _visible(mask: str, seqlen_q: int, seqlen_k: int) -> list[tuple[int, int]]:
    """Return the first visible key of every query, and the end, by trying each key."""
    kind, _, argument = mask.partition(":")
    rows = []
    for i in range(seqlen_q):
        diagonal = i if kind == "causal-top-left" else i + seqlen_k - seqlen_q
        if kind == "full":
            keys: Iterable[int] = range(seqlen_k)
        elif kind == "window":
            left, right = (int(side) for side in argument.split(","))
            keys = (
                j
                for j in range(seqlen_k)
                if (left < 0 or j >= diagonal - left) and (right < 0 or j <= diagonal + right)
            )
        elif kind == "block-causal":
            queries, per_block = -(-seqlen_q // int(argument)), -(-seqlen_k // int(argument))
            keys = (j for j in range(seqlen_k) if j // per_block <= i // queries)
        else:
            keys = (j for j in range(seqlen_k) if j <= diagonal)
        seen = list(keys)
        rows.append((seen[0], seen[-1] + 1) if seen else (0, 0))
    return rows


@pytest.mark.parametrize(
    "mask",
    ["full", "causal", "causal-top-left", "window:70,3", "window:-1,9", "block-causal:5"],
)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(200, 200), (130, 300), (300, 130), (1, 65)])
def test_the_arrays_of_a_mask_say_which_keys_each_query_sees(
    run: Run, mask: str, seqlen_q: int, seqlen_k: int
) -> None:
    done = run("--mask", mask, "--seqlen-q", str(seqlen_q), "--seqlen-k", str(seqlen_k))
    arrays = {
        name: [int(x) for x in rest.split()]
        for name, _, rest in (line.partition(" ") for line in done.stdout.splitlines())
    }
    rows = _visible(mask, seqlen_q, seqlen_k)
    query_tiles, key_tiles = -(-seqlen_q // TILE), -(-seqlen_k // TILE)
    padded = rows + [(0, 0)] * (query_tiles * TILE - seqlen_q)
    assert arrays["rows"] == [bound for row in padded for bound in row]

    ranges, slots = [], [0]
    for m in range(query_tiles):
        tile = rows[m * TILE : (m + 1) * TILE]
        seen = [row for row in tile if row[0] < row[1]]
        some_empty = len(seen) < len(tile)
        ranges += [
            min((lo for lo, _ in seen), default=0),
            0 if some_empty else max(lo for lo, _ in seen),
            0 if some_empty else min(hi for _, hi in seen),
            max((hi for _, hi in seen), default=0),
        ]
    assert arrays["query_ranges"] == ranges
    key_ranges: list[int] = []
    for n in range(key_tiles):
        touching = [
            m
            for m in range(query_tiles)
            if ranges[4 * m] < TILE * (n + 1) and ranges[4 * m + 3] > TILE * n
        ]
        key_ranges += [touching[0], touching[-1] + 1] if touching else [0, 0]
        slots.append(slots[-1] + key_ranges[-1] - key_ranges[-2])
    assert arrays["key_ranges"] == key_ranges
    assert arrays["key_slots"] == slots


def test_the_program_compiles_with_the_headers_of_a_built_library(tmp_path: Path) -> None:
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake to configure the program with")
    library = tmp_path / "libflash_dist_kernels.so"
    library.touch()
    told = [f"-DPython3_EXECUTABLE={sys.executable}", f"-DFLASH_DIST_KERNELS={library}"]
    command = [cmake, "-S", str(SOURCES), "-B", str(tmp_path), *told]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no torch in" in done.stderr or "no CUDA headers" in done.stderr:
        pytest.skip("there are no headers of torch or CUDA here")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "compile_commands.json").read_text(encoding="utf-8"))
    (command,) = (shlex.split(row["command"]) for row in rows if "kernels.cpp" in row["file"])
    subprocess.run([*command[: command.index("-o")], "-fsyntax-only", command[-1]], check=True)


def _json(name: str) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((ROOT / ".vscode" / name).read_text(encoding="utf-8"))
    return parsed


def test_the_editors_configurations_start_what_their_task_builds(run: Run) -> None:
    known = _options_of(run("--help").stdout)
    tasks = {task["label"]: task["command"] for task in _json("tasks.json")["tasks"]}
    cmake = (SOURCES / "CMakeLists.txt").read_text(encoding="utf-8")
    configurations = _json("launch.json")["configurations"]
    assert configurations
    for configuration in configurations:
        folder, program = (
            configuration["program"].removeprefix("${workspaceFolder}/").rsplit("/", 1)
        )
        command = tasks[configuration["preLaunchTask"]]
        assert f"-B {folder} " in command
        assert "-DCMAKE_BUILD_TYPE=Debug" in command
        assert f"add_executable({program}\n" in cmake
        arguments = shlex.split(configuration["args"])
        assert {argument for argument in arguments if argument.startswith("--")} <= known
        assert run("--parse-only", *arguments).returncode == 0


def test_the_page_names_only_options_that_exist(run: Run) -> None:
    page = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
    known = _options_of(run("--help").stdout)
    for block in re.findall(r"attention_debug \\?\n?([^`\n]*--[^`]*?)(?:`|\ndone|\n\n)", page):
        assert {a for a in shlex.split(block) if a.startswith("--")} <= known
    cmake = "".join(
        (folder / "CMakeLists.txt").read_text(encoding="utf-8") for folder in (SOURCES, NATIVE)
    )
    options = set(re.findall(r"^ *(?:set|option)\((\w+) .*$", cmake, re.MULTILINE))
    named = set(re.findall(r"-D(\w+)=", page))
    assert named
    assert {name for name in named if not name.startswith("CMAKE_")} <= options
