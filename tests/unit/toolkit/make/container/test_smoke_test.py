"""The smoke test in a container: each torch, the operators, doctor, the tests of the project."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.container import smoke_test

if TYPE_CHECKING:
    from pathlib import Path

VARIABLE = "MY_NORMS_TEST_TORCH"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Install nothing, and record each torch."""
    found: list[str] = []
    monkeypatch.setattr(smoke_test, "install", found.append)
    return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["smoke_test.py", "my_norms", *words])
    smoke_test.main()


def test_the_first_torch_is_there_before_the_wheel(
    installed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "2.10 2.15")
    run(monkeypatch, "--prepare")
    assert installed == ["2.10"]


def test_without_a_torch_the_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(SystemExit, match=f"{VARIABLE} names no torch, such as `2.10 2.15`"):
        run(monkeypatch, "--prepare")


def test_every_torch_is_judged_and_then_tested(
    installed: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "2.10 2.15")
    monkeypatch.setattr(smoke_test, "judge", installed.append)
    monkeypatch.setattr(smoke_test, "run_test", lambda path: installed.append(path.name))
    run(monkeypatch, "my_norms._toolkit", str(tmp_path / "one.py"), str(tmp_path / "tests"))
    each = ["my_norms._toolkit", "one.py", "tests"]
    assert installed == ["2.10", *each, "2.15", *each]


@pytest.mark.parametrize(
    ("targets", "served"),
    [
        ([[90, False]], {"9.0": True, "7.5": False}),
        ([[75, False], [80, True]], {"7.5": True, "8.0": True}),
    ],
    ids=["hopper", "from turing on"],
)
def test_doctor_is_asked_about_each_target_and_one_gpu_without_code(
    targets: list[list[object]], served: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(code: str) -> str:
        asked.append(code)
        return json.dumps(targets)

    monkeypatch.setattr(smoke_test, "ask", ask)
    assert smoke_test.expected("my_norms._toolkit") == served
    assert "from my_norms._toolkit.builds.manifest import load_manifest" in asked[0]


def test_a_program_does_not_see_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "sources"
    source.mkdir()
    (source / "beside_it.py").touch()
    (source / "program.py").write_text(
        "import importlib.util, sys\nsys.exit(importlib.util.find_spec('beside_it') is not None)"
    )
    monkeypatch.chdir(tmp_path)
    smoke_test.run_test(source / "program.py")


@pytest.mark.parametrize(
    ("name", "text", "status"),
    [
        ("program.py", "raise SystemExit(7)", 7),
        ("tests/test_one.py", "def test_one(): assert False", 1),
        ("tests/test_one.py", "", 5),
    ],
    ids=["program", "test", "no test"],
)
def test_a_test_that_fails_ends_the_smoke_test(
    name: str, text: str, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (tmp_path / "pytest.ini").touch()
    monkeypatch.chdir(tmp_path)
    test = path if path.parent == tmp_path else path.parent
    with pytest.raises(SystemExit, match=f"`{test.name}` ended with {status}"):
        smoke_test.run_test(test)


def test_tests_in_a_folder_run_under_pytest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_one.py").write_text("def test_one(): pass")
    monkeypatch.chdir(tmp_path)
    smoke_test.run_test(tmp_path / "tests")
    assert not list(tmp_path.rglob(".pytest_cache"))


def test_an_answer_of_doctor_that_is_not_expected_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fake_toolkit").mkdir()
    (tmp_path / "fake_toolkit" / "__init__.py").touch()
    (tmp_path / "fake_toolkit" / "cli.py").write_text(
        "import sys\ndef main():\n    print('told', *sys.argv[1:])\n    return 1\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"doctor --gpu 9\.0 ended with 1:\ntold doctor --gpu 9"):
        smoke_test.ask_doctor("fake_toolkit", "9.0", served=True)
    smoke_test.ask_doctor("fake_toolkit", "7.5", served=False)
    assert capsys.readouterr().out == "doctor --gpu 7.5: not served, as it should be\n"
