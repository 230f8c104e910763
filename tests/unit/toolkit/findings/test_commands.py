"""Commands in printed hints: each works as printed, from a wheel, a clone and the .pyz."""

from __future__ import annotations

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import flash_dist
from flash_dist.toolkit.cli import expand_alias, make_parser
from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.targets.archs import SESSIONS
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.made.session_names import every_project, own_sessions
from tests.unit.made.sources import find_modules

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE: Final = Path(flash_dist.__file__).parent
COMPUTED: Final = "8.6"
PROGRAM: Final = "python -m flash_dist "
COMMAND: Final = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:python3? |pip |nox |torchrun )[^`]*)`")
OURS: Final = "-m flash_dist "
PLACES: Final = {  # placeholder -> value in the tests
    "FILE": "lib.so",
    "ID": "no-gpu",
    "LOG": "build.log",
    "MESSAGE": "'no kernel image is available'",
    "NAME": "rich",
    "NEW": "lib.so",
    "OLD": "lib.so",
    "SET": "all",
    "WHEEL": "lib.so",
}
WITHOUT_GPU: Final = {"audit", "doctor", "explain", "inspect", "select", "verify"}
WITHOUT_NETWORK: Final = ("python -m pip --version", "python -m pip debug", "python -m zipfile")
PRINT_ALL: Final = """\
import contextlib, io, json, sys
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.findings import FINDINGS
told = {}
for name in FINDINGS:
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        assert main(["explain", name]) == 0
    told[name] = stream.getvalue()
print(json.dumps(told))
"""


def commands_in(text: str) -> list[str]:
    return COMMAND.findall(text)


@cache
def told_by_entries() -> dict[str, str]:
    """Return the commands in all entries, each with the id of an entry that contains it."""
    return {
        command: one.id
        for one in FINDINGS.values()
        for command in commands_in(f"{one.meaning}\n{one.remedy}\n`{one.command}`")
    }


def fill(command: str) -> str:
    return re.sub(r"\b[A-Z]{2,}\b(?!=)", lambda found: PLACES.get(found[0], found[0]), command)


def words_of(command: str) -> list[str]:
    """Return the words of a command, without redirections of the shell."""
    return shlex.split(fill(command).partition(" < ")[0].partition(" 2>")[0])


# --- They are understood --------------------------------------------------------------------------


def literals(path: Path) -> Iterator[str]:
    """Yield every text of a module that is not a docstring; replace computed parts by 8.6."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = {
        id(part)
        for node in ast.walk(tree)
        for part in ([node.value] if isinstance(node, ast.Expr) else getattr(node, "values", []))
    }
    names = {"PROGRAM": PROGRAM.strip()}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value)
                if isinstance(part, ast.Constant)
                else names.get(ast.unparse(getattr(part, "value", part)), COMPUTED)
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in inside:
            yield node.value if isinstance(node.value, str) else ""


@cache
def told_anywhere() -> dict[str, str]:
    """Return the commands in all texts of the package, each with a module that contains it."""
    return told_by_entries() | {
        command: path.stem
        for path in find_modules()
        for text in literals(path)
        for command in commands_in(text)
    }


def test_the_commands_are_found() -> None:
    told = told_anywhere()
    assert len(told) > 60
    for command in ("python -m flash_dist doctor", "pip install --upgrade torch", "nox -s conda"):
        assert any(one.startswith(command) for one in told)


@pytest.mark.parametrize("command", sorted(one for one in told_anywhere() if OURS in one))
def test_a_command_of_ours_has_such_a_subcommand_and_options(command: str) -> None:
    rest = words_of(command.partition(OURS)[2])
    if rest[-1] != "--help":
        make_parser().parse_args(expand_alias(rest))


def test_nox_has_the_sessions_named_in_hints() -> None:
    told = {
        found
        for command in told_anywhere()
        for found in re.findall(r"nox (?:-R )?-s ([a-z_]+)", command)
    }
    assert {"build_wheels", "conda"} <= told
    assert told | set(SESSIONS.values()) <= own_sessions() & every_project()


@pytest.mark.parametrize(
    "command", [one for one in told_by_entries() if re.search(r"(?:^| )pip (?!un)\w", one)]
)
def test_pip_has_the_options_named_in_hints(command: str) -> None:
    """pip finds nothing without an index, and says so only if pip understands the options."""
    words = words_of(command)
    start = words.index("pip")
    argv = [sys.executable, "-m", *words[start:], "--no-index", "-q", "--dry-run"]
    if "install" not in words:
        argv = argv[:-3]
    if "download" in words:
        argv += ["--no-index", "-q"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=60)
    assert "no such option" not in done.stderr
    assert done.returncode != 2, done.stderr


# --- They run -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the subjects of the commands, and a `python` that runs this Python."""
    made = tmp_path_factory.mktemp("hints")
    image = library(container(entry(SASS, 80, cubin(Kernel("alpha")))), wrappers=1)
    (made / "lib.so").write_bytes(image)
    (made / "build.log").write_text("ninja: build stopped: subcommand failed.\n")
    (made / "bin").mkdir()
    python = made / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    return made


@pytest.fixture(scope="module", params=["wheel", "clone", "pyz"])
def situation(
    request: pytest.FixtureRequest, folder: Path, program: Path
) -> tuple[Path, dict[str, str], str]:
    """Return the package's installation: the working folder, variables, and Python's command."""
    variables = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "COLUMNS": "80"}
    if request.param == "clone":
        return ROOT, variables, ""
    if request.param == "pyz":
        target = folder / "flash dist.pyz"  # users have spaces in their paths
        shutil.copy(program, target)
        start = f"import sys; sys.path.insert(0, {str(target)!r}); sys.argv = ['flash dist.pyz']\n"
        return folder, variables, start
    installed = folder / "site-packages"
    shutil.copytree(PACKAGE, installed / PACKAGE.name, ignore=shutil.ignore_patterns("*.so"))
    return folder, {**variables, "PYTHONPATH": str(installed)}, ""


@pytest.mark.slow
def test_printed_commands_run_unchanged(
    situation: tuple[Path, dict[str, str], str], folder: Path
) -> None:
    cwd, variables, start = situation
    printed = subprocess.run(
        [sys.executable, "-c", start + PRINT_ALL],
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert printed.returncode == 0, printed.stderr
    told = json.loads(printed.stdout)
    assert set(told) == set(FINDINGS)
    commands = {command for text in told.values() for command in commands_in(text)}
    assert any(" explain MESSAGE" in one for one in commands)
    ran = 0
    for command in sorted(commands):
        if not runs_anywhere(command):
            continue
        ran += 1
        words = fill(command)
        if cwd != folder:
            words = re.sub(r"\b(lib\.so|build\.log|report\.html)\b", rf"{folder}/\1", words)
        done = subprocess.run(
            ["sh", "-c", words],
            cwd=cwd,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert "Traceback" not in done.stderr, (command, done.stderr)
        assert done.returncode in {0, 1, 3}, (command, done.returncode, done.stderr)
        assert "No module named" not in done.stderr, (command, done.stderr)
    assert ran >= 15


def runs_anywhere(command: str) -> bool:
    """Tell if a command needs neither a GPU, nor the network, nor a package that may be absent."""
    if command.startswith(WITHOUT_NETWORK):
        return "zipfile" not in command
    words = shlex.split(command.partition(" < ")[0])
    if "-P" in words:  # Python 3.11, and an installed package: the folder is not searched there
        return False
    return "torchrun" not in words and bool(set(words) & WITHOUT_GPU) and "torch" not in command


# --- They leave a sound install alone -------------------------------------------------------------


def told_with(*words: str) -> list[str]:
    return [one for one in told_anywhere() if all(word in one.split() for word in words)]


def test_commands_that_reinstall_a_package_keep_its_dependencies() -> None:
    """With --force-reinstall pip takes the newest of every dependency, even of a pinned numpy."""
    ours = {"flash_dist", COMPUTED}  # exempt: our own package, and names that are computed
    for command in told_with("pip", "install", "--force-reinstall"):
        assert "--no-deps" in command or ours & set(command.split()), command


def test_commands_that_reinstall_a_package_name_its_version() -> None:
    """Without a version pip takes the newest, from another index: a torch of another CUDA."""
    for command in told_with("pip", "install", "--force-reinstall"):
        words = command.partition(" install ")[2].split()
        named = [one for one in words if not one.startswith("-")]
        known = "WHEEL" in named or any("==" in one or COMPUTED in one for one in named)
        assert known or not named or "--no-binary" in words, command


def test_commands_that_recompile_a_package_really_do() -> None:
    """Without these options pip keeps an installed package, or a wheel built for the old torch."""
    told = told_with("pip", "install", "--no-binary")
    assert told
    for command in told:
        assert {"--force-reinstall", "--no-deps", "--no-cache-dir"} <= set(command.split()), command


def test_a_newer_torch_is_never_advised_alone() -> None:
    """Packages compiled for the old torch do not load beside a newer torch."""
    for one in FINDINGS.values():
        if "pip install --upgrade torch`" in one.remedy:
            assert "again" in one.remedy, one.id


def test_search_paths_keep_what_is_in_them() -> None:
    for path in find_modules():
        for text in literals(path):
            for value in re.findall(r"export (?:LD_|LI|PYTHON)\w*PATH=([^`]*)", text):
                assert value.count("$") or "{" in value or COMPUTED in value, (path, text)


def test_a_command_of_one_distribution_says_so() -> None:
    for path in find_modules():
        for text in literals(path):
            if "`apt-get" in text:
                assert "Debian" in text or "Ubuntu" in text, (path, text)
