"""User's view of `python -m flash_dist inspect`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import jsonschema
import pytest

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.cli.inspect import json_pieces
from flash_dist.toolkit.cli.terminal.results import make_console, make_table, print_table
from flash_dist.toolkit.cli.terminal.text import printable
from flash_dist.toolkit.gpucode.inspection import Choice, inspect_libraries
from flash_dist.toolkit.gpucode.libraries import open_libraries
from flash_dist.toolkit.targets.wording import count, format_size
from tests.unit.made.fatbin_builder import PTX, SASS, Kernel, container, cubin, entry, library, ptx

if TYPE_CHECKING:
    from tests.unit.made.command import Cli

ROOT = Path(__file__).parents[4]
SCHEMA = json.loads((ROOT / "docs/schema/inspect.json").read_text())
ALPHA = Kernel("alpha", 96, smem=1024, max_threads=(128, 1, 1), constant=352, local=16)
IMAGES = container(
    entry(SASS, 80, cubin(ALPHA)),
    entry(SASS, 90, cubin(Kernel("alpha")), suffix="a", codec="zstd"),
    entry(PTX, 80, ptx("alpha"), codec="zstd"),
)


@pytest.fixture
def lib(tmp_path: Path) -> Path:
    path = tmp_path / "lib.so"
    path.write_bytes(library(IMAGES, wrappers=1))
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "pkg.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pkg/lib.so", library(IMAGES, wrappers=1))
        archive.writestr("pkg/plain.so", library())
        archive.writestr("pkg/__init__.py", "")
    return path


def test_the_table_lists_targets_old_to_new(lib: Path, cli: Cli) -> None:
    out, err = cli("inspect", lib)
    assert f"{lib}: 3 images, " in out
    lines = [line.split() for line in out.splitlines()]
    assert [line[:4] for line in lines[2:5]] == [
        ["sm_80", "SASS", "1", "none"],
        ["compute_80", "PTX", "1", "zstd"],
        ["sm_90a", "SASS", "1", "zstd"],
    ]
    assert lines[3][4] == "9.0"
    assert err == ""


def test_kernels_are_listed_when_asked_for(lib: Path, cli: Cli) -> None:
    rows = [line.split() for line in cli("inspect", "--level", "kernels", lib).out.splitlines()]
    assert ["alpha", "sm_80", "96", "1024", "0", "16", "352", "128", "128"] in rows
    assert ["alpha", "compute_80"] in rows


def test_json_is_versioned_and_complete(wheel: Path, cli: Cli) -> None:
    document = json.loads(cli("inspect", "--json", "--level", "kernels", wheel).out)
    jsonschema.validate(document, SCHEMA)
    assert (document["version"], document["level"]) == (1, "kernels")
    kernels, plain = document["libraries"]
    assert (kernels["path"], plain["path"]) == ("pkg/lib.so", "pkg/plain.so")
    assert kernels["archs"] == ["sm_80", "compute_80", "sm_90a"]
    assert kernels["kernels"][0] == {
        "name": "alpha",
        "demangled": "alpha",
        "arch": "sm_80",
        "registers": 96,
        "static_smem": 1024,
        "stack": 0,
        "code_size": 128,
        "max_threads": 128,
        "constant": 352,
        "local": 16,
        "toolkit": None,
        "container": 0,
    }
    assert (plain["entries"], plain["kernels"], plain["warnings"]) == ([], [], [])


def test_json_without_kernels_does_not_unpack(lib: Path, cli: Cli) -> None:
    assert "kernels" not in json.loads(cli("inspect", "--json", lib).out)["libraries"][0]


@pytest.mark.parametrize("level", ["targets", "kernels", "coverage", "sizes"])
def test_the_json_of_every_level_is_that_of_the_schema(
    level: str, wheel: Path, lib: Path, cli: Cli
) -> None:
    document = json.loads(cli("inspect", "--json", "--level", level, wheel, lib).out)
    jsonschema.validate(document, SCHEMA)
    assert [library["path"] for library in document["libraries"]] == [
        "pkg/lib.so",
        "pkg/plain.so",
        str(lib),
    ]


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_kernels_and_targets_are_chosen(lib: Path, cli: Cli) -> None:
    argv = ["inspect", "--json", "--level", "kernels", str(lib)]
    (library_,) = json.loads(cli(*argv, "--target", "sm_90a").out)["libraries"]
    assert [kernel["arch"] for kernel in library_["kernels"]] == ["sm_90a"]
    assert library_["archs"] == ["sm_90a"]
    assert json.loads(cli(*argv, "--kernel", "beta").out)["libraries"][0]["kernels"] == []


@pytest.mark.parametrize("text", ["sm_", "sm_x", "compute_80b", "fast"])
def test_a_target_that_is_none_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--target", text, "lib.so"]) == 2
    message = f"an architecture looks like `sm_90a`, `compute_80` or `9.0a`, got `{text}`"
    assert message in capsys.readouterr().err


def test_nothing_to_inspect_is_wrong_usage(cli: Cli) -> None:
    assert "must be given a PATH, --package or --pid" in cli("inspect", status=2).err


def test_sizes_name_the_kernels_with_the_most_code(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    kernels = cubin(Kernel("small", code=bytes(256)), Kernel("large", code=bytes(4096)))
    path.write_bytes(library(container(entry(SASS, 80, kernels))))
    out = cli("inspect", "--level", "sizes", path).out
    assert out.index("large") < out.index("small")
    assert "4.1 kB" in out


def test_coverage_counts_verdicts_and_lists_what_is_not_real_everywhere(
    tmp_path: Path, cli: Cli
) -> None:
    path = tmp_path / "lib.so"
    both, one = cubin(Kernel("alpha"), Kernel("beta")), cubin(Kernel("alpha"))
    path.write_bytes(library(container(entry(SASS, 80, both), entry(SASS, 90, one))))
    rows = [line.split() for line in cli("inspect", "--level", "coverage", path).out.splitlines()]
    assert ["target", "real", "missing"] in rows
    assert ["sm_80", "2"] in rows
    assert ["sm_90", "1", "1"] in rows
    assert ["beta", "real", "missing"] in rows
    assert not any(row[:1] == ["alpha"] for row in rows)


def test_the_middle_of_a_long_name_is_left_out(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    name = "a" * 90 + "b" * 90 + "c" * 90
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel(name))))))
    assert f"{'a' * 90}...{'c' * 30}" in cli("inspect", "--level", "kernels", path).out


def test_long_tables_are_cut_unless_asked_for_whole(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    kernels = cubin(*(Kernel(f"kernel{i}") for i in range(250)))
    path.write_bytes(library(container(entry(SASS, 80, kernels))))
    out = cli("inspect", "--level", "kernels", path).out
    assert "50 kernels more: --kernel TEXT and --target T choose" in out
    assert cli("inspect", "--level", "kernels", "--all", path).out.count("sm_80") == 251


def test_a_wheel_prints_each_library(wheel: Path, cli: Cli) -> None:
    out = cli("inspect", wheel).out
    assert "pkg/lib.so: 3 images" in out
    assert "pkg/plain.so: no GPU code for NVIDIA" in out


def test_a_wheel_without_libraries_says_so(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "pure.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "")
    assert "no library inside" in cli("inspect", path).out


def test_damage_is_a_warning_and_a_failure_when_strict(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(IMAGES + b"junkjunk"))
    assert "warning: " in cli("inspect", path).err
    assert main(["inspect", "--strict", str(path)]) == 1


def test_an_unreadable_file_is_an_error_on_stderr(tmp_path: Path, cli: Cli) -> None:
    out, err = cli("inspect", tmp_path / "absent.so", status=2)
    assert out == ""
    assert err.startswith("error: cannot read `")


def test_names_cannot_steer_the_terminal(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("a\x1b[31m[bold]b"))))))
    out = cli("inspect", "--level", "kernels", path).out
    assert "\x1b" not in out
    assert r"a\x1b[31m[bold]b" in out


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch, lib: Path) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("flash_dist.toolkit.cli.inspect.open_libraries", interrupt)
    assert main(["inspect", str(lib)]) == 130


def run_module(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flash_dist", *argv]
    env = {**os.environ, **environ}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def test_the_module_runs_and_colour_can_be_refused(lib: Path) -> None:
    done = run_module("inspect", str(lib), NO_COLOR="1", FORCE_COLOR="")
    assert (done.returncode, done.stderr) == (0, "")
    assert "sm_90a" in done.stdout
    assert "\x1b" not in done.stdout


def test_inspecting_loads_neither_torch_nor_the_extension(lib: Path) -> None:
    script = (
        "import sys; from flash_dist.toolkit.cli import main; "
        f"main(['inspect', {str(lib)!r}]); assert not {{'torch', 'numpy'}} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True)


def test_sizes_and_counts_are_written_for_people() -> None:
    assert [format_size(size) for size in (7, 1500, 7_940_000)] == ["7 B", "1.5 kB", "7.9 MB"]
    assert [count(number, "image") for number in (1, 2)] == ["1 image", "2 images"]
    assert printable("plain\nline\t\x07\u202e") == "plain\\nline\\t\\x07\\u202e"


def test_a_path_that_cannot_be_read_does_not_end_the_rest(lib: Path, cli: Cli) -> None:
    absent = lib.parent / "absent.so"
    out, err = cli("inspect", absent, lib, status=2)
    assert f"{lib}: 3 images" in out
    assert f"error: cannot read `{absent}`: No such file" in err


def test_a_damaged_library_of_a_folder_does_not_end_the_rest(lib: Path, cli: Cli) -> None:
    broken = lib.parent / "a_broken.so"
    broken.write_bytes(library(container(entry(SASS, 80, b"noise" * 30))))
    out, err = cli("inspect", "--level", "kernels", lib.parent)
    assert "alpha" in out
    assert f"warning: cannot read `{broken}`: sm_80 image at offset" in err
    err = cli("inspect", "--level", "kernels", broken, status=2).err
    assert f"error: cannot read `{broken}`: sm_80 image" in err


def test_no_kernel_is_called_real_if_none_can_be_read(tmp_path: Path, cli: Cli) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(library(container(entry(SASS, 80, b"noise" * 30))))
    out, err = cli("inspect", "--level", "coverage", path, status=2)
    assert "is real" not in out
    assert f"error: {path}: none of its 1 image can be read" in err


@pytest.mark.parametrize(
    "command",
    [
        "inspect",
        "audit",
        "verify",
        "verify lib.whl --manifest",
        "selftest --record",
        "bench --json",
    ],
)
def test_an_empty_path_is_no_folder(command: str, cli: Cli) -> None:
    """A script passes an empty path if its variable is not set."""
    err = cli(*command.split(), "", status=2).err
    assert "a path must name a file or folder, got an empty one" in err


@pytest.mark.parametrize("command", ["doctor --wheel", "select --index"])
def test_an_empty_place_is_no_folder_either(command: str, cli: Cli) -> None:
    err = cli(*command.split(), "", status=2).err
    assert "a place must be a path or an address, got an empty one" in err


def test_a_gpu_as_target_takes_all_code_named_after_it(
    lib: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", "--target", "9.0", str(lib)]) == 0
    assert "sm_90a" in capsys.readouterr().out
    assert main(["inspect", "--target", "8.0", str(lib)]) == 0
    out = capsys.readouterr().out
    assert "sm_80" in out
    assert "compute_80" in out
    assert main(["inspect", "--target", "sm_90", str(lib)]) == 0
    said = f"{lib}: none of the code asked for; it has sm_80, compute_80, sm_90a\n"
    assert capsys.readouterr().out == said


def test_json_of_many_kernels_comes_in_pieces(lib: Path) -> None:
    """The text of a large library would take several times the memory of its data."""
    inspections, _ = inspect_libraries(open_libraries(lib), Choice("kernels"))
    pieces = list(json_pieces("kernels", inspections, []))
    assert len(pieces) > 20
    document = json.loads("".join(pieces))
    assert document["libraries"] == [json.loads(json.dumps(one.to_json())) for one in inspections]


def test_images_of_a_target_are_written_to_files(
    lib: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = lib.parent / "out"
    assert main(["inspect", "--extract", "all", "--to", str(folder), str(lib)]) == 0
    cubins = [folder / "lib.so.0.sm_80.cubin", folder / "lib.so.1.sm_90a.cubin"]
    text = folder / "lib.so.2.compute_80.ptx"
    assert sorted(folder.iterdir()) == [*cubins, text]
    assert cubins[0].read_bytes() == cubin(ALPHA)
    assert cubins[1].read_bytes() == cubin(Kernel("alpha"))
    assert text.read_bytes() == ptx("alpha").rstrip(b"\0")
    assert f"{text}: compute_80 of {lib}, " in capsys.readouterr().out
    assert main(["inspect", "--extract", "9.0", "--to", str(folder), str(lib)]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["inspect", "--extract", "sm_75", "--to", str(folder), str(lib)]) == 2
    assert "there is no code for sm_75; `inspect`" in capsys.readouterr().err
    assert main(["inspect", "--extract", "all", "--kernel", "zeta", str(lib)]) == 2
    assert "there is no code with a kernel named like zeta;" in capsys.readouterr().err
    assert main(["inspect", "--to", str(folder), str(lib)]) == 2
    assert (
        f"--to must come with --extract, which writes there, got only --to {folder}"
        in capsys.readouterr().err
    )


def test_only_images_with_a_kernel_are_written(tmp_path: Path) -> None:
    path, folder = tmp_path / "lib.so", tmp_path / "out"
    images = [entry(SASS, 80, cubin(Kernel(name))) for name in ("alpha", "beta")]
    path.write_bytes(library(b"".join(map(container, images))))
    given = ["--extract", "sm_80", "--kernel", "bet", "--to", str(folder), str(path)]
    assert main(["inspect", *given]) == 0
    assert [one.name for one in folder.iterdir()] == ["lib.so.1.sm_80.cubin"]


def test_a_library_with_an_odd_name_writes_where_it_is_told(tmp_path: Path) -> None:
    wheel, folder = tmp_path / "pkg.whl", tmp_path / "out"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("a/..\nx$(y) .so", library(IMAGES))
    assert main(["inspect", "--extract", "sm_80", "--to", str(folder), str(wheel)]) == 0
    assert [one.name for one in folder.iterdir()] == ["_x_y_.so.0.sm_80.cubin"]


def test_a_long_table_is_laid_out_as_rich_does_and_soon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make_table("kernel", "target", "registers")
    for number in range(1, 40):
        table.add_row("k" * number, f"sm_{number}", str(number**3))
    print_table(make_console(), table)
    short = capsys.readouterr().out
    monkeypatch.setattr("flash_dist.toolkit.cli.terminal.results.MANY_ROWS", 10)
    print_table(make_console(), table)
    assert capsys.readouterr().out == "".join(f"{one.rstrip()}\n" for one in short.splitlines())
    monkeypatch.undo()
    for _ in range(20_000):
        table.add_row("kernel", "sm_80", "128")
    start = time.process_time()
    print_table(make_console(), table)
    assert time.process_time() - start < 2
