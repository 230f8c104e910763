"""GitHub's workflows build all published sets, and their commands call existing sessions."""

from __future__ import annotations

import json
import re
import shlex
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import pytest
import yaml

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.building.matrix import main, make_matrix
from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.release.channels import released
from flash_dist.toolkit.make.release.release import STAGES, make_parser
from flash_dist.toolkit.make.sessions import NATIVE
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.session_names import own_sessions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
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


# Programs that GitHub's machines have besides Python and nox, with the options and subcommands in
# use.
PROGRAMS: Final = {
    "apt-get": {"install", "--yes"},
    "chown": {"-R"},
    "cp": set[str](),
    "echo": set[str](),
    "gh": {"release", "create", "--verify-tag", "--title", "--notes"},
    "git": {"ls-files", "-z"},
    "sha256sum": {"--check"},
    "touch": {"--no-dereference", "--date"},
}
BEFORE: Final = {"sudo": 1, "env": 1, "xargs": 1}  # run the command that follows them
OPTIONS_OF: Final = {"xargs": {"-0"}}
SETS: Final = {one.name for one in published_sets()}


def build_args(words: list[str]) -> bool:
    return set(words) - {NATIVE, "$SET"} <= SETS


def release_args(words: list[str]) -> bool:
    return all(make_parser().parse_args([stage, *words]) for stage in STAGES)


# Validators of the arguments that sessions get.
ACCEPTED: Final[dict[str, Callable[[list[str]], bool]]] = {
    "build_arm": build_args,
    "build_wheels": build_args,
    "integrations": lambda words: all(re.fullmatch(r"[0-9]+(\.[0-9]+)+", one) for one in words),
    "release": release_args,
    "repro": build_args,
    "unit_tests": lambda words: words in (["--all"], ["--slow"]),
}


def find_commands(path: Path) -> Iterator[list[str]]:
    """Yield the words of each command of a workflow, also of those in `$(...)`."""
    for step in steps(path):
        text = re.sub(r"\$\{\{.*?\}\}", "VALUE", str(step.get("run", "")))
        inner = re.findall(r"\$\(([^()]*)\)", text)
        text = re.sub(r"\$\([^()]*\)", "VALUE", text)
        for part in [*re.split(r"\n|&&|\|", text), *inner]:
            words = shlex.split(part, comments=True)
            if words:
                yield words[: words.index(">>")] if ">>" in words else words


def strip_wrappers(words: list[str]) -> list[str]:
    """Return a command without the programs that run it, and without its variables."""
    while words[0] in BEFORE or "=" in words[0]:
        known = OPTIONS_OF.get(words[0], set())
        words = words[1:]
        while words[0] in known:
            words = words[1:]
    return words


def require_command(words: list[str]) -> None:
    """Fail unless a command parses, and the files and sessions that it names exist."""
    program, *rest = strip_wrappers(words)
    name = program.rpartition("/")[2]
    if name == "nox":
        require_session(rest)
    elif name in {"python", "python3"}:
        assert rest[0] == "-m", words
        assert rest[1] in {"pip", "venv"} or find_spec(rest[1]), rest[1]
        if rest[1] == "pip":
            require_locked(rest[2:])
        if rest[1] == "flash_dist.toolkit.make.building.matrix":
            assert main(rest[2:]) == 0
    elif name == "pip":
        require_locked(rest)
    else:
        assert name in PROGRAMS, f"`{name}` is not a known program: {words}"
        told = {one for one in rest if one.startswith("-")}
        assert told <= PROGRAMS[name], f"{name}: {told - PROGRAMS[name]}"


def require_session(words: list[str]) -> None:
    assert words[0] == "-s", words
    end = words.index("--") if "--" in words else len(words)
    names, given = words[1:end], words[end + 1 :]
    assert names
    assert set(names) <= own_sessions()
    if given:
        (name,) = names
        assert ACCEPTED[name](given), f"nox -s {name} -- {shlex.join(given)}"


def require_locked(words: list[str]) -> None:
    """Fail unless pip installs only what files of this repository list, by hash."""
    assert words[:2] == ["install", "--require-hashes"]
    pairs = list(zip(words[2::2], words[3::2], strict=True))
    assert pairs
    for option, file in pairs:
        assert option == "-r"
        assert (ROOT / file).is_file(), file


@each_workflow
def test_every_command_parses_and_exists(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = list(find_commands(path))
    assert commands
    for words in commands:
        require_command(words)
    capsys.readouterr()


@pytest.mark.parametrize(
    "text",
    [
        "nox -s no_such_session",
        "nox -s release -- --no-such-option",
        "nox -s build_wheels -- no-such-set",
        "nox -s lint -- --fast",
        "nox lint",
        "python3 -m flash_dist.no_such_module",
        "python -m flash_dist.toolkit.make.building.matrix --no-such-option",
        "python -m pip install -r ci/locks/nox.txt",
        "python -m pip install --require-hashes -r ci/locks/no_such_file.txt",
        "sudo env A=b nosuchprogram",
        "gh release create --no-such-option",
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str) -> None:
    with pytest.raises((AssertionError, KeyError, ModuleNotFoundError, SystemExit)):
        require_command(shlex.split(text))


def test_jobs_need_only_jobs_that_exist_and_call_only_workflows_that_exist() -> None:
    for path in WORKFLOWS:
        jobs = read(path)["jobs"]
        for job in jobs.values():
            needs = job.get("needs", [])
            assert set([needs] if isinstance(needs, str) else needs) <= jobs.keys()
            called = job.get("uses", "")
            assert not called or (ROOT / called.removeprefix("$/")).is_file()


def test_outputs_that_steps_read_are_of_steps_before_them() -> None:
    for path in WORKFLOWS:
        for job in read(path)["jobs"].values():
            known: set[str] = set()
            for step in job.get("steps", []):
                assert set(re.findall(r"steps\.([a-z_]+)\.", json.dumps(step))) <= known
                known.add(step.get("id", ""))


def test_a_release_is_attested_and_its_attestation_is_published() -> None:
    found = list(steps(ROOT / ".github" / "workflows" / "release.yml"))
    (attest,) = (step for step in found if "attest-build-provenance@" in step.get("uses", ""))
    assert attest["with"] == {"subject-checksums": "dist/SHA256SUMS"}
    (made,) = (step["run"] for step in found if "gh release create" in str(step.get("run", "")))
    assert "dist/attestations.json" in made
    assert "dist/provenance/*.json" in made
    assert not re.search(r"secrets\.|SIGNING_KEY", json.dumps(found)), "no private key on GitHub"
