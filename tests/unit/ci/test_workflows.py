"""GitHub's workflows build all published sets, with existing sessions; `nox -s workflows`."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.building.matrix import main, make_matrix
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.release.channels import released
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.session_names import own_sessions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BUILD = ROOT / ".github" / "workflows" / "build.yml"
each_workflow = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def steps(path: Path) -> Iterator[dict[str, Any]]:
    for job in read(path)["jobs"].values():
        yield from job.get("steps", [])


def named_sessions(path: Path) -> set[str]:
    """Return the words after `nox -s`, up to `--`."""
    commands = [str(step.get("run", "")) for step in steps(path)]
    found = [match for text in commands for match in re.findall(r'nox"? -s ([a-z_ ]+)', text)]
    return {name for words in found for name in words.split()}


def test_the_matrix_is_the_published_sets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json"]) == 0
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    rows = json.loads(said)["include"]
    assert [(row["set"], row["archs"], row["toolkit"], row["machine"]) for row in rows] == [
        (one.name, str(one), one.toolkit, one.machine) for one in published_sets()
    ]
    assert main([]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(published_sets())


def test_a_set_of_ones_own_is_a_job_of_its_own() -> None:
    (row,) = make_matrix([ArchSet.parse("8.0;8.6+PTX", name="ampere", label="ampere")])["include"]
    assert (row["set"], row["archs"]) == ("ampere", "8.0;8.6+PTX")


def test_the_build_takes_its_matrix_from_the_data() -> None:
    jobs = read(BUILD)["jobs"]
    assert jobs["wheel"]["strategy"]["matrix"] == "${{ fromJSON(needs.matrix.outputs.matrix) }}"
    assert (
        "python3 -m flash_dist.toolkit.make.building.matrix --json"
        in jobs["matrix"]["steps"][-1]["run"]
    )
    assert jobs["wheel"]["strategy"]["fail-fast"] is False


def test_every_part_of_the_local_check_is_run_somewhere() -> None:
    named = {name for path in WORKFLOWS for name in named_sessions(path)}
    local = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    wanted = {name for words in re.findall(r"nox -s ([a-z_ ]+)", local) for name in words.split()}
    assert wanted - {"tests"} <= named
    assert {"unit_tests", "wheel_tests", "reader_tests", "examples"} <= named


def test_the_workflow_of_a_build_writes_every_channel_of_a_release_in_its_order() -> None:
    (line,) = (step["run"] for step in steps(BUILD) if " manifest " in str(step.get("run", "")))
    names = [row.name for row in released()]
    wanted = ["fingerprint_check", *names, "manifest", "install_test"]
    assert line.split()[2:] == wanted, "the line of nox in build.yml names the sessions"


def test_a_release_keeps_the_folder_of_every_channel_that_the_page_links_to() -> None:
    found = list(steps(ROOT / ".github" / "workflows" / "release.yml"))
    kept = [
        str(step["with"]["path"]) for step in found if "upload-artifact@" in step.get("uses", "")
    ]
    made = [step["run"] for step in found if "gh release create" in str(step.get("run", ""))]
    linked = [row.name for row in released() if row.linked]
    assert linked
    for name in linked:
        assert any(f"dist/{name}/\n" in text for text in kept), f"keep dist/{name}/ in release.yml"
        assert any(f" dist/{name}/" in text for text in made), f"pack dist/{name}/ in release.yml"


@each_workflow
def test_every_session_that_is_named_exists(path: Path) -> None:
    named = named_sessions(path)
    assert named
    assert named <= own_sessions()


@each_workflow
def test_actions_are_pinned_by_commit_with_their_version_beside_it(path: Path) -> None:
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if "uses:" in line]
    pinned = re.compile(r"\s*(- )?uses: [\w/.-]+@[0-9a-f]{40} # v[0-9]+\.[0-9]+\.[0-9]+")
    assert [one for one in lines if not pinned.fullmatch(one) and "uses: $/" not in one] == []


def test_an_action_has_one_commit_everywhere() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    pins = set(re.findall(r"uses: ([\w/.-]+)@([0-9a-f]{40})", text))
    commits = {(name.partition("/cache")[0], commit) for name, commit in pins}
    assert len(commits) == len({name for name, _ in commits})


@each_workflow
def test_nothing_is_allowed_that_is_not_named_and_every_job_ends(path: Path) -> None:
    workflow = read(path)
    assert workflow["permissions"] == {}
    assert "concurrency" in workflow
    for job in workflow["jobs"].values():
        assert "permissions" in job
        assert "uses" in job or "timeout-minutes" in job
    checkouts = [step for step in steps(path) if "actions/checkout@" in step.get("uses", "")]
    assert all(step["with"]["persist-credentials"] is False for step in checkouts)


def test_a_release_compiles_from_nothing() -> None:
    caches = [
        step
        for path in WORKFLOWS
        for step in steps(path)
        if "actions/cache/" in step.get("uses", "")
    ]
    assert caches
    assert all("github.ref_type != 'tag'" in step["if"] for step in caches)


def test_a_pull_request_of_a_fork_never_reaches_a_gpu() -> None:
    path = ROOT / ".github" / "workflows" / "gpu.yml"
    assert "pull_request_target" not in path.read_text(encoding="utf-8")
    (job,) = read(path)["jobs"].values()
    assert job["runs-on"] == ["self-hosted", "gpu"]
    assert "github.event.pull_request.head.repo.full_name == github.repository" in job["if"]
