"""A release that was killed in the middle of a write resumes later, and gives the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.make.project import ROOT
from flash_dist.toolkit.make.release.steps import (
    MARK,
    RECORD,
    Step,
    StepError,
    find_running,
    hash_files,
    walk,
)
from tests.unit.toolkit.make.release.test_channels import load_noxfile

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

STEPS = (Step("build", ("set/*.whl",)), Step("judge"), Step("pack", ("pack/**/*",)))


class Runner:
    """Writes the files of each step, and lists the steps that ran."""

    def __init__(self, dist: Path) -> None:
        self.dist = dist
        self.ran: list[str] = []
        self.wheel = "wheel"

    def __call__(self, step: Step) -> None:
        self.ran.append(step.name)
        places = {"build": "set/a.whl", "pack": "pack/deep/b"}
        if step.name in places:
            path = self.dist / places[step.name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(self.wheel if step.name == "build" else "packed")

    def walk(self, basis: str = "commit", steps: Iterable[Step] = STEPS) -> tuple[list[str], ...]:
        self.ran = []
        return walk(self.dist, basis, steps, self), self.ran


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    made = Runner(tmp_path / "dist")
    assert made.walk() == ([], ["build", "judge", "pack"])
    return made


def test_complete_steps_are_skipped(runner: Runner) -> None:
    assert runner.walk() == (["build", "judge", "pack"], [])


def test_a_changed_or_lost_file_repeats_its_step(runner: Runner) -> None:
    (runner.dist / "pack" / "deep" / "b").write_text("other")
    assert runner.walk() == (["build", "judge"], ["pack"])
    (runner.dist / "pack" / "more").write_text("")
    assert runner.walk()[1] == ["pack"]
    (runner.dist / "set" / "a.whl").unlink()
    assert runner.walk() == (["judge", "pack"], ["build"])  # the repeated step made the same bytes


def test_other_bytes_repeat_every_later_step(runner: Runner) -> None:
    runner.wheel = "another wheel"
    (runner.dist / "set" / "a.whl").unlink()
    assert runner.walk() == ([], ["build", "judge", "pack"])


def test_another_commit_or_argument_repeats_what_depends_on_it(runner: Runner) -> None:
    assert runner.walk("another commit") == ([], ["build", "judge", "pack"])
    steps = (*STEPS[:2], Step("pack", STEPS[2].made, ("--url", "x")))
    assert runner.walk("another commit", steps) == (["build", "judge"], ["pack"])


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"version": 2, "steps": {}}'])
def test_a_record_that_cannot_be_read_repeats_all(text: str, runner: Runner) -> None:
    (runner.dist / RECORD).write_text(text)
    assert runner.walk() == ([], ["build", "judge", "pack"])


def test_a_failed_step_is_not_recorded(runner: Runner) -> None:
    steps = (STEPS[0], Step("nothing", ("nothing/*",)))
    for _ in range(2):
        with pytest.raises(StepError, match=r"`nothing` made no file nothing/\* in"):
            walk(runner.dist, "commit", steps, runner)
    assert runner.ran[-2:] == ["nothing", "nothing"]


STEP = "import time; print('started', flush=True); time.sleep(600)"
PARENT = """
import pathlib, subprocess, sys
from flash_dist.toolkit.make.release.steps import Step, walk

def run(step):
    subprocess.run([sys.executable, "-c", sys.argv[2]], check=True)

walk(pathlib.Path(sys.argv[1]), "commit", [Step("build")], run)
"""


def test_a_release_does_not_start_beside_a_step_of_a_killed_one(runner: Runner) -> None:
    words = [sys.executable, "-c", PARENT, str(runner.dist), STEP]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"started\n"
        parent.kill()
    running = find_running(runner.dist)
    try:
        (pid,) = running
        said = rf"is still running: 1 process, such as {pid} `.*time\.sleep"
        with pytest.raises(StepError, match=said) as refused:
            runner.walk()
        assert refused.value.hint == f"wait until it ends, or `kill {pid}`; then start again"
        assert runner.ran == []
        assert find_running(runner.dist / "another") == {}
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
    while find_running(runner.dist):
        time.sleep(0.01)
    assert runner.walk() == (["build", "judge", "pack"], [])
    assert MARK not in os.environ


# Runs real steps on a small wheel. The process kills itself before the N-th change of a file.
DRIVER = """
import os, pathlib, shutil, signal, sys
from flash_dist.toolkit.make.conda import pack
from flash_dist.toolkit.make.release import index, zipapp
from flash_dist.toolkit.make.release.channels import CHANNELS
from flash_dist.toolkit.make.release.manifest import write_release
from flash_dist.toolkit.make.release.signing import find_signers
from flash_dist.toolkit.make.release.steps import Step, walk
from flash_dist.toolkit.make.wheels.artefacts import find_artefacts
from flash_dist.toolkit.make.wheels.source import Source
from tests.unit.made.whole_wheel import BLOBS, make_declared, write_whole_wheel

dist, dependencies, limit = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
changes = 0

def count(owner, name):
    original = getattr(owner, name)
    def call(*args, **options):
        global changes
        changes += 1
        if changes == limit:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)
    setattr(owner, name, call)

for owner, names in (
    (pathlib.Path, ("write_text", "write_bytes", "mkdir", "rename", "replace", "unlink")),
    (shutil, ("copyfile", "rmtree", "copytree")),
):
    for name in names:
        count(owner, name)

def run(step):
    print("ran", step.name, flush=True)
    if step.name == "build":
        return write_whole_wheel(dist / "hopper")
    artefacts = find_artefacts(dist)
    if step.name == "conda":
        return pack.write_channel(dist / "conda", artefacts, epoch="1767225600")
    if step.name == "index":
        rows = [row for row in CHANNELS.values() if row.linked]
        offers = index.find_offers(dist, artefacts, rows, "https://example.org/")
        return index.write_index(
            dist / "index", artefacts, "https://example.org/", partial=True, offers=offers
        )
    if step.name == "zipapp":
        return zipapp.build_zipapp(dependencies, dist / zipapp.FILE)
    source = Source("c" * 40, BLOBS, make_declared().sources)
    return write_release(dist, artefacts, source, find_signers())

steps = (
    Step("build", ("hopper/*.whl",)),
    Step("conda", ("conda/**/*",)),
    Step("index", ("index/**/*",)),
    Step("zipapp", ("*.pyz",)),
    Step("manifest", ("manifest*.json", "SHA256SUMS", "provenance/*")),
)
print("skipped", *walk(dist, "commit", steps, run))
print("changes", changes)
"""


def drive(tmp_path: Path, dist: Path, limit: int = 0) -> subprocess.CompletedProcess[str]:
    from flash_dist.toolkit.make.release.signing import PRIVATE, make_keys  # noqa: PLC0415
    from tests.unit.made.signed_release import LAST_DAY  # noqa: PLC0415

    keys, dependencies = tmp_path / "keys", tmp_path / "dependencies"
    if not keys.exists():
        make_keys(keys, LAST_DAY)
        dependencies.mkdir()
    return subprocess.run(
        [sys.executable, "-c", DRIVER, str(dist), str(dependencies), str(limit)],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "FLASH_DIST_SIGNING_KEY": str(keys / PRIVATE)},
        text=True,
        capture_output=True,
        check=False,
    )


@pytest.mark.slow
def test_a_release_that_is_killed_at_five_points_gives_the_same_bytes(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    done = drive(tmp_path, whole)
    assert done.returncode == 0, done.stderr
    changes = int(done.stdout.split()[-1])
    assert changes > 20
    wanted = hash_files(whole, ["**/*"])
    assert {"manifest.dsse.json", "flash_dist.pyz", RECORD} <= wanted.keys()
    repeated = []
    for number in range(1, 6):
        dist = tmp_path / f"killed-{number}"
        limit = changes * number // 6
        assert drive(tmp_path, dist, limit).returncode == -signal.SIGKILL
        record = dist / RECORD
        complete = json.loads(record.read_text())["steps"] if record.exists() else {}
        again = drive(tmp_path, dist)
        assert again.returncode == 0, again.stderr
        ran = [line.removeprefix("ran ") for line in again.stdout.splitlines() if "ran " in line]
        assert not set(ran) & set(complete)
        repeated.append(tuple(ran))
        found = hash_files(dist, ["**/*"])
        assert {name: digest for name, digest in found.items() if wanted.get(name) != digest} == {}
        assert found.keys() == wanted.keys()
    assert len(set(repeated)) >= 3, "the kills hit several steps"


def test_the_session_has_the_files_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASH_DIST_SIGNING_KEY", "/keys/private.pem")
    noxfile, _ = load_noxfile(monkeypatch)
    url = ["--url", "https://example.org/x/"]
    steps = {one.name: one for one in noxfile.release_steps(url)}
    assert list(steps) == ["build_arm", "build_wheels", "wheels", *noxfile.RELEASED]
    judging = {name for name, one in steps.items() if not one.made}
    assert judging == {"fingerprint_check", "install_test"}
    assert steps["build_arm"].made == ("arm/*.whl",)
    assert set(steps["wheels"].made) == {*steps["build_arm"].made, *steps["build_wheels"].made}
    assert steps["conda"].made == ("conda/**/*",)
    assert steps["sdist"].made == ("flash_dist-*.tar.gz",)
    assert steps["index"].asked == tuple(url)
    assert steps["manifest"].asked == ("/keys/private.pem",)
    given = [one.name for one in noxfile.release_steps(["--no-build"])]
    assert given == ["wheels", *noxfile.RELEASED]
