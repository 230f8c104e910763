"""Select from the command line: text, JSON by its schema, exit status."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from ci.install_tests.clients import serve
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.machine.libcuda import Cuda
from tests.unit.made.builds import ALL, make_environment
from tests.unit.made.wheels import write_dist, write_simple_index

if TYPE_CHECKING:
    from flash_dist.toolkit.checks.environment import Environment
    from tests.unit.made.command import Cli

ROOT = Path(__file__).parents[4]
SCHEMA = json.loads((ROOT / "docs/schema/select.json").read_text())


def select(cli: Cli, *arguments: str) -> tuple[int, str, str]:
    status, out, err = cli.run("select", *arguments)
    return status, out, err


def as_json(cli: Cli, *arguments: str) -> dict[str, Any]:
    status, out, _ = select(cli, "--json", *arguments)
    data: dict[str, Any] = json.loads(out)
    jsonschema.validate(data, SCHEMA)
    assert data["exit_code"] == status
    return data


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Environment:
    made = make_environment(ALL, "8.6", "9.0", "9.0")
    monkeypatch.setattr("flash_dist.toolkit.cli.select.read_cuda", lambda: made.cuda)
    return made


def test_a_choice_for_gpus_elsewhere_names_its_python(tmp_path: Path, cli: Cli) -> None:
    words = ("--gpu", "9.0", "--driver", "580", "--index", str(write_dist(tmp_path)))
    status, out, _ = select(cli, *words)
    assert status == 0
    assert f"for Python {platform.python_version()}, as here: `--python` names another" in out
    assert "as here" not in select(cli, *words, "--python", "3.12")[1]
    assert as_json(cli, *words, "--python", "3.12")["python"] == "3.12"
    status, out, err = select(cli, *words, "--python", "3.9")
    assert (status, out.count("pip install")) == (1, 0)
    assert "5 of 6 wheels are not for Python 3.9" in err
    assert as_json(cli, "--gpu", "9.0")["python"] is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--python", "three"), "a Python is a version such as 3.12, got `three`"),
        (("--python", "2.7"), "a Python is a version such as 3.12, got `2.7`"),
        (("--python", "3.12"), "--python is for the wheels of an --index, which is not given"),
    ],
)
def test_a_python_that_says_nothing_is_refused(
    cli: Cli, words: tuple[str, ...], message: str
) -> None:
    status, _, err = select(cli, "--gpu", "9.0", *words)
    assert status == 2
    assert message in err


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_the_set_its_reasons_and_the_commands(cli: Cli) -> None:
    status, text, err = select(cli, "--gpu", "8.6,9.0,9.0,12.0", "--driver", "580")
    assert (status, err) == (0, "")
    weight = {one.name: one.wheel_bytes or 0 for one in published_sets()}
    size = {name: f"{number / 1e6:.1f} MB" for name, number in weight.items()}
    smaller = {
        "hopper": "SASS sm_90a; no PTX, {}: no code for 8.6, 12.0",
        "blackwell": "SASS sm_100, sm_120; no PTX, {}: no code for 8.6, 9.0",
        "cuda12": "SASS sm_75, sm_80, sm_90a; no PTX, {}: no code for 12.0",
        "turing-ampere-ada": "SASS sm_75, sm_80, sm_86, sm_89; PTX compute_89, {}: "
        "only PTX through the JIT for 9.0, 12.0",
    }
    assert text == (
        f"all: SASS sm_75, sm_80, sm_90a, sm_100, sm_120; PTX compute_80, {size['all']}\n"
        "  compute capability 8.6: code of the same major (sm_80)\n"
        "  2 x compute capability 9.0: native code (sm_90a)\n"
        "  compute capability 12.0: native code (sm_120)\n"
        "smaller sets:\n"
        + "".join(
            f"  {name}: {smaller[name].format(size[name])}\n"
            for name in sorted(smaller, key=lambda name: weight[name])
        )
        + "\n"
        "build   nox -s build_wheels -- all\n"
        "pip     pip install dist/all/*.whl\n"
        "uv      uv pip install dist/all/*.whl\n"
    )
    assert select(cli, "-q", "--gpu", "8.6,9.0,12.0")[1] == text.partition("\n\n")[2]
    _, text, _ = select(cli, "-v", "--gpu", "9.0")
    assert "other sets:" in text
    assert f"PTX compute_80, {size['all']}: serves them as well" in text


def test_parts_of_arm_machines_are_reported_with_their_command(cli: Cli) -> None:
    _, text, _ = select(cli, "--gpu", "8.7,9.0")
    assert (
        "8.7 comes only in Arm machines, whose set is `arm`: "
        "`python -m flash_dist select --gpu 8.7 --machine aarch64`\n"
    ) in text
    status, text, _ = select(cli, "--gpu", "8.7", "--machine", "aarch64")
    assert (status, text.split(":")[0]) == (0, "arm")
    assert "Arm machines" not in text


def test_the_gpus_of_the_machine(machine: Environment, cli: Cli) -> None:
    assert machine.cuda.gpus
    status, text, _ = select(cli)
    assert status == 0
    assert "GPU A (compute capability 8.6), 24 GiB, 82 SMs: code of the same major" in text
    data = as_json(cli)
    assert data["chosen"]["name"] == "cuda12"  # native code, as in `all`, and smaller
    assert data["what_if"] is False
    assert as_json(cli, "--driver", "535")["chosen"]["name"] == "cuda12"
    assert as_json(cli, "--driver", "470")["chosen"] is None


def test_no_gpu_is_nothing_to_choose_for(monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    absent = Cuda("absent", reason="libcuda.so.1 was not found")
    monkeypatch.setattr("flash_dist.toolkit.cli.select.read_cuda", lambda: absent)
    status, out, err = select(cli)
    assert (status, out) == (3, "")
    assert "no GPU here to choose for (libcuda.so.1 was not found)" in err
    assert "hint: `python -m flash_dist select --gpu 8.6,9.0`" in err
    assert as_json(cli)["chosen"] is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "9.0", "--driver", "470"), "fix: install NVIDIA driver 525 or newer"),
        (("--gpu", "12.0", "--driver", "535"), "fix: install NVIDIA driver 580 or newer"),
        (("--gpu", "7.0"), "no build serves compute capability 7.0: they start at 7.5"),
        (("--gpu", "8.6,7.0"), "compute capability 7.0: no build serves it"),
    ],
)
def test_the_reason_is_given_if_no_set_serves(
    arguments: tuple[str, ...], words: str, cli: Cli
) -> None:
    status, text, _ = select(cli, *arguments)
    assert status == 1
    assert words in text
    assert as_json(cli, *arguments)["exit_code"] == 1


def test_the_driver_that_is_advised_works_the_gpu(cli: Cli) -> None:
    status, text, _ = select(cli, "--gpu", "8.6,10.7", "--driver", "580")
    assert status == 1
    assert "10.7 needs driver 615 or newer, not driver 580" in text
    assert "fix: install NVIDIA driver 615 or newer" in text


def test_an_index_without_a_set_for_all_says_what_each_lacks(tmp_path: Path, cli: Cli) -> None:
    write_dist(tmp_path)
    for path in (tmp_path / "all").iterdir():
        path.unlink()
    status, text, _ = select(cli, "--gpu", "9.0,12.0", "--index", str(tmp_path / "hopper"))
    assert status == 1
    assert f"no wheel in `{tmp_path}/hopper` serves all of 9.0, 12.0" in text
    assert "fix: `nox -s build_wheels -- all` builds the arch set `all`" in text
    assert "no code for 12.0" in text


def test_a_folder_and_an_index(tmp_path: Path, cli: Cli) -> None:
    dist = write_dist(tmp_path / "dist")
    write_dist(tmp_path / "dist" / "old", "0.0.9")
    data = as_json(cli, "--gpu", "9.0", "--index", str(dist))
    assert data["chosen"]["version"] == "0.1.0+cu130.hopper"
    assert data["commands"][0]["line"].startswith(f"pip install {dist}/hopper/flash_dist-0.1.0")
    write_simple_index(tmp_path / "site", dist)
    with serve(tmp_path / "site") as url:
        data = as_json(cli, "--gpu", "9.0", "--index", f"{url}simple/")
    assert data["chosen"]["version"] == "0.1.0+cu130.hopper"
    assert data["chosen"]["wheel"]["index"] == f"{url}simple/"


def test_a_place_without_wheels_is_wrong_usage(tmp_path: Path, cli: Cli) -> None:
    status, out, err = select(cli, "--gpu", "9.0", "--index", str(tmp_path))
    assert (status, out) == (2, "")
    assert f"there is no wheel of flash_dist in `{tmp_path}`" in err


def test_a_set_for_arm_is_built_by_a_session_of_its_own(cli: Cli) -> None:
    data = as_json(cli, "--gpu", "12.1", "--driver", "580", "--machine", "aarch64")
    assert (data["chosen"]["name"], data["commands"][0]["line"]) == (
        "arm",
        "nox -s build_arm -- arm",
    )
