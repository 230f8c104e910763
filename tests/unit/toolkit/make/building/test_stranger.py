"""Builds of another project with a separately installed toolkit, up to the compiler."""

from __future__ import annotations

import email
import json
import os
import shutil
import stat
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.building.backend import UNFINISHED
from flash_dist.toolkit.make.declared.names import DISTRIBUTION
from flash_dist.toolkit.make.project import TOOLKIT, load_requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.slow

BACKEND = f"{DISTRIBUTION}.backend"


class Stranger:
    """A folder with the toolkit on Python's path, and a project beside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.project = folder / "my-norms"
        site = folder / "site"
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(TOOLKIT, site / DISTRIBUTION, ignore=ignored)
        gxx = folder / "g++-here"
        gxx.write_text("#!/bin/sh\necho 12.2.0\n")
        gxx.chmod(gxx.stat().st_mode | stat.S_IXUSR)
        own = ("CUDA_HOME", "MAX_JOBS", "NOX_", "SOURCE_DATE_EPOCH", "MY_NORMS_", "FATWHEEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
        self.environ = {
            **kept,
            "PYTHONPATH": str(site),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TORCH_CUDA_ARCH_LIST": "9.0a",
            "CXX": str(gxx),
            "TORCH_ROOT": str(folder),  # avoids downloading headers
        }

    def run(
        self, *argv: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run Python, by default in the project."""
        return subprocess.run(
            [sys.executable, *argv],
            cwd=cwd or self.project,
            env={**self.environ, **(environ or {})},
            capture_output=True,
            text=True,
            check=False,
        )

    def hook(self, call: str, cwd: Path | None = None, **environ: str) -> str:
        """Call a hook of the build backend as pip does, and return what it returns."""
        code = f"import {BACKEND} as backend; print('returned', repr(backend.{call}))"
        done = self.run("-c", code, cwd=cwd, environ=environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.rpartition("returned ")[2].strip()


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Stranger:
    made = Stranger(tmp_path_factory.mktemp("stranger"))
    done = made.run("-m", DISTRIBUTION, "new", "my-norms", cwd=made.folder)
    assert (done.returncode, "my-norms/pyproject.toml" in done.stdout) == (0, True), done.stderr
    return made


def test_new_refuses_a_name_in_a_sentence(stranger: Stranger) -> None:
    done = stranger.run("-m", DISTRIBUTION, "new", "torch", cwd=stranger.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: NAME must be that of a new package, got `torch`, which")


def test_the_commands_work_for_the_project_in_the_folder_and_without_one(
    stranger: Stranger,
) -> None:
    for cwd, name in ((stranger.project, "my_norms"), (stranger.folder, DISTRIBUTION)):
        version = stranger.run("-m", DISTRIBUTION, "--version", cwd=cwd)
        assert (version.returncode, version.stderr) == (0, "")
        assert version.stdout.startswith(f"{name} ")
        audit = stranger.run("-m", DISTRIBUTION, "audit", "--help", cwd=cwd)
        assert (audit.returncode, audit.stderr) == (0, "")
        assert audit.stdout.startswith(f"usage: python -m {DISTRIBUTION} audit")


def test_a_variable_names_the_project(stranger: Stranger) -> None:
    named = {f"{DISTRIBUTION.upper()}_PROJECT": str(stranger.project)}
    done = stranger.run("-m", DISTRIBUTION, "--version", cwd=stranger.folder, environ=named)
    assert done.stdout.startswith("my_norms ")
    named = dict.fromkeys(named, "nowhere")
    done = stranger.run("-m", DISTRIBUTION, "--version", cwd=stranger.folder, environ=named)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {DISTRIBUTION.upper()}_PROJECT names `nowhere`, and no")


IMAGINED = ("--gpu", "9.0,7.0", "--driver", "580")


def test_select_chooses_among_the_sets_of_the_project(stranger: Stranger) -> None:
    words = ("-m", DISTRIBUTION, "select", "--gpu", "9.0", "--driver", "580")
    done = stranger.run(*words)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("hopper: SASS sm_90a; no PTX\n")
    done = stranger.run(*words, cwd=stranger.folder)
    assert (done.returncode, done.stdout) == (2, "")
    said = "error: the current folder has no `pyproject.toml` with a table [tool.kernels.sets]\n"
    assert done.stderr.startswith(said)
    assert "hint: run it in the folder of a project, or let FATWHEEL_PROJECT name" in done.stderr


def test_doctor_judges_the_sets_of_the_project(stranger: Stranger) -> None:
    done = stranger.run("-m", DISTRIBUTION, "doctor", *IMAGINED)
    assert (done.returncode, done.stderr) == (1, "")
    assert "this is the toolkit by itself, which has no kernels to judge" in done.stdout
    assert "`python -m my_norms doctor` judges the installed package" in done.stdout
    assert "compute capability 9.0: served by `all` and `hopper`" in done.stdout
    assert "compute capability 7.0: no arch set of the project serves it" in done.stdout
    assert "install a wheel" not in done.stdout
    done = stranger.run("-m", DISTRIBUTION, "doctor", *IMAGINED, cwd=stranger.folder)
    assert (done.returncode, done.stderr) == (3, "")
    assert "`python -m PACKAGE doctor` judges the installed package" in done.stdout
    assert "not judged, there is no build to judge it against" in done.stdout


def test_the_backend_asks_for_its_tools_and_a_cuda_toolkit(stranger: Stranger) -> None:
    told = stranger.hook("get_requires_for_build_wheel()")
    assert told == repr([*load_requirements("backend"), "cuda-toolkit[nvcc,cccl]==13.0.*"])
    assert stranger.hook("get_requires_for_build_sdist()") == repr(load_requirements("backend"))


def test_requirements_of_a_build_are_listed_for_a_machine_without_a_network(
    stranger: Stranger,
) -> None:
    info = stranger.folder / "site" / f"{DISTRIBUTION}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {DISTRIBUTION}\nVersion: 0.1.0\n", encoding="utf-8")
    done = stranger.run("-m", DISTRIBUTION, "requirements")
    shutil.rmtree(info)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == [
        f"{DISTRIBUTION}==0.1.0",
        *load_requirements("backend"),
        "cuda-toolkit[nvcc,cccl]==13.0.*",
        "torch==2.13.0",
    ]
    done = stranger.run("-m", DISTRIBUTION, "requirements", cwd=stranger.folder)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: cannot read `pyproject.toml`: No such file")


def test_a_wheel_is_described_before_it_is_built(stranger: Stranger, tmp_path: Path) -> None:
    call = f"prepare_metadata_for_build_wheel({str(tmp_path)!r})"
    told = stranger.hook(call, MY_NORMS_ARCH_SET="hopper", TORCH_CUDA_ARCH_LIST="")
    assert told == "'my_norms-0.1.0+cu130.hopper.dist-info'"
    text = (tmp_path / told.strip("'") / "METADATA").read_text(encoding="utf-8")
    metadata = email.message_from_string(text)
    assert (metadata["Name"], metadata["Version"]) == ("my_norms", "0.1.0+cu130.hopper")
    assert "torch>=2.10" in metadata.get_all("Requires-Dist", [])
    assert {path.name for path in stranger.project.iterdir()} == {
        ".gitignore", "README.md", "csrc", "noxfile.py", "pyproject.toml", "src", "tests",
    }  # fmt: skip


def test_the_sources_are_packed_twice_with_the_same_bytes(
    stranger: Stranger, tmp_path: Path
) -> None:
    project = copy_project(stranger, tmp_path)
    packed = []
    for name in ("one", "two"):
        folder = tmp_path / name
        made = stranger.hook(f"build_sdist({str(folder)!r})", cwd=project).strip("'")
        packed.append((folder / made).read_bytes())
        with tarfile.open(folder / made) as archive:
            names = {one.partition("/")[2] for one in archive.getnames()}
    assert made == "my_norms-0.1.0.tar.gz"
    assert {"csrc/scale.cu", "csrc/scale.h", "csrc/binding.cpp", "src/my_norms/ops.py"} <= names
    assert {"pyproject.toml", "PKG-INFO"} <= names
    assert packed[0] == packed[1]


def test_a_wheel_of_packed_sources_has_their_version(stranger: Stranger, tmp_path: Path) -> None:
    project = copy_project(stranger, tmp_path)
    made = stranger.hook(f"build_sdist({str(tmp_path)!r})", cwd=project).strip("'")
    with tarfile.open(tmp_path / made) as archive:
        archive.extractall(tmp_path)  # noqa: S202 - made by us a moment ago
    unpacked = tmp_path / "my_norms-0.1.0"
    unfinished = f", {{{UNFINISHED!r}: 'true'}}"
    for settings, version in (("", "0.1.0"), (unfinished, "0.1.0+cu130.sm90a")):
        call = f"prepare_metadata_for_build_wheel({str(tmp_path)!r}{settings})"
        assert stranger.hook(call, cwd=unpacked) == repr(f"my_norms-{version}.dist-info")
        shutil.rmtree(tmp_path / f"my_norms-{version}.dist-info")


def test_the_sessions_are_listed(stranger: Stranger) -> None:
    done = stranger.run("-m", "nox", "-l")
    assert done.returncode == 0, done.stderr
    assert {"build_wheels", "build_arm", "image", "tests", "audit", "repro"} <= set(
        done.stdout.replace("*", "-").split()
    )


def test_setuptools_installs_the_whole_toolkit(stranger: Stranger, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(stranger.folder / "site" / DISTRIBUTION, source)
    code = f"import setuptools; setuptools.setup(script_args=['build_py', '-d', {str(tmp_path)!r}])"
    done = stranger.run("-c", code, cwd=source)
    assert done.returncode == 0, done.stderr
    assert list_files(tmp_path / DISTRIBUTION) == list_files(
        stranger.folder / "site" / DISTRIBUTION
    )


def list_files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


# Each row changes one text in the table that `new` writes, and has the expected error. Some
# commands do not need the named files, and must work without them.
BROKEN = {
    "a test that is not there": (
        "wheel_mb = 5",
        'wheel_mb = 5\ntests = ["test"]',
        '`tests` of [tool.kernels.gates] names `"test"`, and there is no such',
    ),
    "an unknown key": ("torch_min", "torch_mni", 'unknown key `"torch_mni"`'),
    "a number for a text": ('version = "0.1.0"', "version = 1", "must be a version such as"),
    "a file that is not there": ('"csrc/*.cu"', '"src/*.cu"', "there is no such file"),
    "a set without a target": ('hopper = "9.0a"', 'hopper = "9.5"', "unknown architecture `9.5`"),
    "a set for a newer CUDA": ('hopper = "9.0a"', 'hopper = "10.7"', "CUDA 13.0 cannot compile"),
    "no set": ("[tool.kernels.sets]", "[tool.other]", "names no arch set"),
    "no table": ("tool.kernels", "tool.other", "has no table [tool.kernels]"),
    "another package": ('name = "my_norms"', 'name = "json"', "a word or module of Python"),
    "no table of kernels": (
        "[tool.kernels.gates]",
        '[tool.kernels.dispatch]\ntable = "csrc/kernels.toml"\n[tool.kernels.gates]',
        '`table` of [tool.kernels.dispatch] names `"csrc/kernels.toml"`, and there is no such',
    ),
    "axes of another type": (
        "[tool.kernels.gates]",
        "[tool.kernels.dispatch]\naxes = [{ name = 3 }]\n[tool.kernels.gates]",
        "[tool.kernels.dispatch] lacks `table`",
    ),
    "axes of no rule": (
        "[tool.kernels.gates]",
        '[tool.kernels.dispatch]\naxes = [{ name = "a", rule = "b" }]\n[tool.kernels.gates]',
        "the rule of axis `a` must be equal, holds, fits or last",
    ),
}
UNREADABLE = {
    "no TOML": b"[tool.kernels\n",
    "no UTF-8": b"[tool.kernels] # \xff\n",
    "a byte order mark": b"\xef\xbb\xbf[tool.kernels]\n",
}
ENTRIES = {
    "the backend": ("-c", f"import {BACKEND}"),
    "the sessions": ("-c", f"import {DISTRIBUTION}.sessions"),
    "the commands": ("-m", DISTRIBUTION, "--version"),
}


def copy_project(stranger: Stranger, folder: Path) -> Path:
    return Path(shutil.copytree(stranger.project, folder / "my-norms"))


def break_project(stranger: Stranger, folder: Path, data: bytes) -> Path:
    broken = copy_project(stranger, folder)
    (broken / "pyproject.toml").write_bytes(data)
    return broken


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_table_gives_a_sentence(
    name: str, entry: str, stranger: Stranger, tmp_path: Path
) -> None:
    old, new, said = BROKEN[name]
    text = (stranger.project / "pyproject.toml").read_text(encoding="utf-8")
    assert old in text
    broken = break_project(stranger, tmp_path, text.replace(old, new).encode())
    require_sentence(stranger.run(*ENTRIES[entry], cwd=broken), entry, said)


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("name", UNREADABLE)
def test_an_unreadable_table_gives_a_sentence(
    name: str, entry: str, stranger: Stranger, tmp_path: Path
) -> None:
    broken = break_project(stranger, tmp_path, UNREADABLE[name])
    require_sentence(stranger.run(*ENTRIES[entry], cwd=broken), entry, "cannot read `")


def test_nox_ends_with_the_sentence_as_well(stranger: Stranger, tmp_path: Path) -> None:
    done = stranger.run("-m", "nox", "-l", cwd=break_project(stranger, tmp_path, b""))
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "error: `" in done.stderr
    assert "has no table [tool.kernels]" in done.stderr


def require_sentence(done: subprocess.CompletedProcess[str], entry: str, said: str) -> None:
    assert "Traceback" not in done.stderr, done.stderr
    if entry == "the commands" and done.returncode == 0:
        assert (done.stderr, bool(done.stdout)) == ("", True)  # these commands do not need the file
        return
    assert done.returncode in {1, 2}, done.stderr
    assert said in done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    errors = [line for line in lines if line.startswith("error: ")]
    assert len(errors) == 1, done.stderr
    assert all(line.startswith(("error: ", "hint: ")) for line in lines), done.stderr


@pytest.mark.parametrize(
    ("call", "environ"),
    [
        ("get_requires_for_build_wheel()", {"MY_NORMS_ARCH_SET": "hoper"}),
        ("get_requires_for_build_wheel()", {"TORCH_CUDA_ARCH_LIST": "9.5"}),
        ("get_requires_for_build_editable()", {"PIP_BUILD_TRACKER": "folder"}),
        ("build_editable('.')", {}),
        ("build_sdist('.')", {"SOURCE_DATE_EPOCH": "banana"}),
    ],
    ids=str,
)
def test_a_hook_that_cannot_do_what_is_asked_ends_in_a_sentence(
    call: str, environ: dict[str, str], stranger: Stranger, tmp_path: Path
) -> None:
    code = f"import {BACKEND} as backend; backend.{call}"
    done = stranger.run("-c", code, cwd=copy_project(stranger, tmp_path), environ=environ)
    assert done.returncode == 1, (call, done.stdout)
    assert "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr


def tell(stranger: Stranger, code: str, cwd: Path | None = None, **environ: str) -> str:
    """Return the output of a program that sees the toolkit of the project."""
    done = stranger.run("-c", code, cwd=cwd, environ=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


SETTINGS = f"""
import json
from {DISTRIBUTION}.make.container.settings import cibuildwheel_settings
print(json.dumps(cibuildwheel_settings()))
"""


def test_the_settings_of_a_container_bear_the_name_of_the_project(stranger: Stranger) -> None:
    found = json.loads(tell(stranger, SETTINGS))
    assert found["CIBW_ENVIRONMENT"].split() == [
        "CUDA_HOME=/opt/cuda",
        "MY_NORMS_STATIC_STDCXX=ON",
        "CCACHE_DISABLE=1",
        "PYTHONPATH=/project/build/toolkit",
    ]
    assert "MY_NORMS_ARCH_SET" in found["CIBW_ENVIRONMENT_PASS"].split()
    assert found["CIBW_BEFORE_ALL"].endswith(f"python -m {DISTRIBUTION}.make.container.setup")
    toolkit = f"{{project}}/build/toolkit/{DISTRIBUTION}"
    assert found["CIBW_TEST_COMMAND"] == (
        f"python {toolkit}/make/container/smoke_test.py "
        "my_norms my_norms._toolkit {project}/tests"
    )
    assert (found["CIBW_TEST_GROUPS"], found["CIBW_TEST_REQUIRES"]) == ("test", "pytest")
    assert "FLASH_DIST" not in str(found)


TREE = f"""
from pathlib import Path
from {DISTRIBUTION}.make.container.tree import add_toolkit, copy_project
copy_project(Path("../tree")), add_toolkit(Path("../tree"))
"""


def test_a_container_gets_the_project_and_the_toolkit_and_reads_both(
    stranger: Stranger, tmp_path: Path
) -> None:
    project = copy_project(stranger, tmp_path)
    (project / "dist").mkdir()
    (project / "dist" / "old.whl").touch()
    tell(stranger, TREE, cwd=project)
    tree = tmp_path / "tree"
    toolkit = tree / "build" / "toolkit" / DISTRIBUTION
    assert list_files(toolkit) == list_files(stranger.folder / "site" / DISTRIBUTION)
    copied = {name for name in list_files(tree) if not name.startswith("build/")}
    hidden = {".gitignore"}
    assert copied == {name for name in list_files(stranger.project) if name not in hidden}
    code = "from fatwheel.make.container.setup import wanted_toolkit; print(wanted_toolkit())"
    asked = {"MY_NORMS_ARCH_SET": "hopper", "PYTHONPATH": str(toolkit.parent)}
    assert tell(stranger, code, cwd=tree, **asked) == "13.0\n"


def test_tests_of_a_wheel_are_named_or_left_out(stranger: Stranger, tmp_path: Path) -> None:
    project = copy_project(stranger, tmp_path)
    pyproject = project / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    for told, words in (
        ('["src/my_norms/ops.py"]', ["{project}/src/my_norms/ops.py"]),
        ("[]", []),
    ):
        changed = text.replace("wheel_mb = 5", f"wheel_mb = 5\ntests = {told}")
        pyproject.write_text(changed, encoding="utf-8")
        found = json.loads(tell(stranger, SETTINGS, cwd=project))
        assert found["CIBW_TEST_COMMAND"].split()[4:] == words
        assert "CIBW_TEST_REQUIRES" not in found


def test_an_engine_that_does_not_answer_is_reported_with_a_hint(
    stranger: Stranger, tmp_path: Path
) -> None:
    code = f"from {DISTRIBUTION}.make.container.portable import build_all; build_all([])"
    done = stranger.run("-c", code, environ={"PATH": str(tmp_path)})
    assert "no container engine answers: neither `podman info` nor `docker info`" in done.stderr
    assert "build natively: `-- --native`" in done.stderr
