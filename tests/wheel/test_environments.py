"""The installed wheel in faulty environments: a sentence, a fix, a status.

Each fault is planted around a separate process; the install itself does not change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import flash_dist

PACKAGE = Path(flash_dist.__file__).parent
LIBRARY = PACKAGE / "libflash_dist_kernels.so"
RUNS = "open('ran.txt', 'w').close(); raise SystemExit(9)\n"  # must not run: it is no package

# Commands that work without a GPU, and their expected exit status.
COMMANDS = {
    "doctor --no-selftest": 3,
    "doctor --gpu 9.0 --driver 580": 0,
    f"inspect {LIBRARY}": 0,
    "select --gpu 9.0": 0,
    "explain no-gpu": 0,
}
HARMLESS = {
    "no home": {"HOME": ""},
    "no folder for temporary files": {"TMPDIR": "/nonexistent"},
    "optimised": {"PYTHONOPTIMIZE": "2"},
    "warnings are errors": {"PYTHONWARNINGS": "error"},
    "the C locale": {"LC_ALL": "C"},
    "the C locale, without UTF-8": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "stdout is ASCII": {"PYTHONIOENCODING": "ascii"},
    "a narrow dumb terminal": {"TERM": "dumb", "COLUMNS": "1", "FORCE_COLOR": "1"},
    "no user site": {"PYTHONNOUSERSITE": "1"},
    "no GPU of that name": {"CUDA_VISIBLE_DEVICES": "garbage,-3,,"},
    "nothing to preload": {"LD_PRELOAD": "/nonexistent/libx.so"},
    "no such library folder": {"LD_LIBRARY_PATH": ":/nonexistent"},
}


@dataclass(frozen=True)
class Place:
    """Working folder and variables of a process."""

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, *argv: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        unset = ("PYTHONPATH", "PYTHONSAFEPATH", "LD_LIBRARY_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run(
            [sys.executable, *options, "-m", "flash_dist", *argv],
            cwd=self.folder,
            env={**clean, "CUDA_VISIBLE_DEVICES": "", **self.environ},
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            timeout=300,
        )
        assert "Traceback" not in done.stderr
        return done

    def diagnose(self, *argv: str, options: tuple[str, ...] = ()) -> dict[str, Any]:
        """Run doctor and return its checks by name."""
        done = self.run("doctor", "--json", *argv, options=options)
        return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def require_fine(place: Place, command: str) -> None:
    done = place.run(*command.split())
    assert done.returncode == COMMANDS[command], done.stdout + done.stderr
    assert "[fail]" not in done.stdout
    assert "Warning" not in done.stderr


@pytest.mark.parametrize("variables", HARMLESS.values(), ids=HARMLESS)
def test_what_changes_nothing_is_no_failure(tmp_path: Path, variables: dict[str, str]) -> None:
    require_fine(Place(tmp_path, variables), next(iter(COMMANDS)))


@pytest.mark.parametrize("command", COMMANDS)
def test_all_of_it_together_is_no_failure(tmp_path: Path, command: str) -> None:
    merged = {name: value for one in HARMLESS.values() for name, value in one.items()}
    require_fine(Place(tmp_path, merged), command)


@pytest.mark.parametrize("option", ["-I", "-P"] if sys.version_info >= (3, 11) else ["-I"])
def test_an_isolated_doctor_runs_nothing_of_the_folder_it_is_in(
    tmp_path: Path, option: str
) -> None:
    (tmp_path / "torch.py").write_text(RUNS)
    checks = Place(tmp_path).diagnose(options=(option,))
    assert checks["extension"]["status"] == "ok"
    assert not (tmp_path / "ran.txt").exists()


def test_what_pythonpath_names_is_not_run_where_variables_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(RUNS)
    place = Place(Path("/"), {"PYTHONPATH": str(tmp_path)})
    assert place.diagnose(options=("-E",))["extension"]["status"] == "ok"
    assert place.diagnose("--only", "torch")["torch"]["id"] == "torch-shadowed"


def test_a_script_called_torch_is_named_and_not_the_wheel(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(RUNS)
    checks = Place(tmp_path).diagnose("--no-selftest")
    for name in ("torch", "extension"):
        assert checks[name]["id"] == "torch-shadowed"
        assert checks[name]["fix"].startswith(f"leave {tmp_path}")


def test_a_folder_called_rich_is_one_sentence_from_every_subcommand(tmp_path: Path) -> None:
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").touch()
    for command in ("doctor", "inspect", "verify", "select", "explain", "selftest", "audit"):
        done = Place(tmp_path).run(command, "--help")
        assert done.returncode == 2
        assert done.stderr.startswith("error: `import rich`")
        assert f"{tmp_path}/rich/__init__.py" in done.stderr.splitlines()[0]


@pytest.mark.parametrize("data", [b"", b"no library\n" * 9], ids=["empty", "text"])
def test_a_broken_libstdcxx_in_ld_library_path_is_that_variables_matter(
    tmp_path: Path, data: bytes
) -> None:
    (tmp_path / "libstdc++.so.6").write_bytes(data)
    place = Place(Path("/"), {"LD_LIBRARY_PATH": str(tmp_path)})
    for checks in (place.diagnose("--no-selftest"), place.diagnose()):
        assert checks["extension"]["id"] == "library-broken"
        assert checks["extension"]["fix"] == f"`unset LD_LIBRARY_PATH`: it names {tmp_path}"
        listed = (checks["variables"]["summary"], *checks["variables"]["details"])
        assert any(f"LD_LIBRARY_PATH={tmp_path}"[:80] in line for line in listed)


def test_sources_before_the_wheel_are_to_be_left(tmp_path: Path) -> None:
    for module in PACKAGE.rglob("*.py"):
        copy = tmp_path / "flash_dist" / module.relative_to(PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(module.read_bytes())
    for name in ("archsets.json", "product.json"):
        (tmp_path / "flash_dist" / name).write_bytes((PACKAGE / name).read_bytes())
    checks = Place(tmp_path).diagnose("--only", "install,build")
    assert [check["id"] for check in checks.values()] == ["install-twice", "not-built"]
    assert all(check["fix"].startswith("leave the source tree") for check in checks.values())
    named = Place(Path("/"), {"PYTHONPATH": str(tmp_path)}).diagnose("--only", "install,build")
    assert all(
        "PYTHONPATH" in check["fix"] and str(tmp_path) in check["fix"] for check in named.values()
    )


def test_a_folder_that_is_gone_is_no_damaged_torch(tmp_path: Path) -> None:
    code = (
        "import os, sys, tempfile\n"
        "folder = tempfile.mkdtemp()\n"
        "os.chdir(folder)\n"
        "os.rmdir(folder)\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flash_dist', 'doctor', '--json'])\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    extension = checks["extension"]
    assert extension["status"] == "ok" or extension["fix"].startswith("`cd /` and run it again")


@pytest.mark.parametrize("limit", [16, 24])
def test_few_open_files_are_no_damage(limit: int) -> None:
    code = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'flash_dist', 'doctor', '--json'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    for check in json.loads(done.stdout)["checks"]:
        assert check["status"] in {"ok", "skip"} or "`ulimit -n 1024`" in check["fix"]
