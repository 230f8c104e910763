"""Doctor's results on loading libraries: predictions, attempts, and their differences."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.tags import parse_tag

from flash_dist.toolkit.checks.environment import prove_loading, read_libc
from flash_dist.toolkit.checks.loading import check_loading
from flash_dist.toolkit.cli import main
from flash_dist.toolkit.doctor.examine import Examination, examine, will_run
from flash_dist.toolkit.doctor.proof import compare_selftest
from flash_dist.toolkit.findings.install import TORCH_ABSENT
from flash_dist.toolkit.findings.loading import GLIBC_TOO_OLD
from flash_dist.toolkit.loading.linker import read_host
from flash_dist.toolkit.loading.parts import Loading, predict_parts, try_loading
from flash_dist.toolkit.loading.process import Outcome
from flash_dist.toolkit.loading.tags import judge_tags
from flash_dist.toolkit.machine.libcuda import Cuda
from flash_dist.toolkit.machine.torch_install import Torch, read_torch
from flash_dist.toolkit.selftest.run import check_selftest, judge_outcome
from tests.unit.made.builds import ALL, HOPPER, make_environment
from tests.unit.made.library_builder import Lab, call, define, needs_gcc

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.toolkit.checks.environment import Environment

GOOD = Loading("ok", source="predicted")
BAD = Loading(
    "failed", "extension", "_C.so needs glibc 2.38", "predicted", GLIBC_TOO_OLD, "move on"
)
OPEN = Loading("unknown", "extension", "nothing defines `x`", "predicted")
TRIED, BROKEN = (
    Loading("ok"),
    Loading("failed", "extension", "version `GLIBC_2.38' not found\nmore"),
)


def machine(loading: Loading, predicted: Loading | None = None) -> Environment:
    return replace(make_environment(ALL, "9.0"), loading=loading, predicted=predicted)


@pytest.mark.parametrize(
    ("loading", "predicted", "status", "cause", "words"),
    [
        (GOOD, None, "ok", "", "should load (predicted from symbol tables)"),
        (BAD, None, "fail", "glibc-too-old", "the torch extension will not load: _C.so needs"),
        (OPEN, None, "skip", "loading-unknown", "cannot be predicted: nothing defines"),
        (TRIED, GOOD, "ok", "", "the kernel library and the torch extension load"),
        (TRIED, OPEN, "ok", "", "extension load"),
        (BROKEN, OPEN, "fail", "extension-failed", "does not load: version"),
        (BROKEN, BAD, "fail", "glibc-too-old", "does not load: version"),
        (BROKEN, GOOD, "fail", "load-prediction-differs", "does not load: version"),
        (TRIED, BAD, "warn", "load-prediction-differs", "though the symbol tables say otherwise"),
        (BROKEN, None, "fail", "extension-failed", "does not load"),
    ],
)
def test_prediction_and_attempt_make_one_result(
    loading: Loading, predicted: Loading | None, status: str, cause: str, words: str
) -> None:
    result = check_loading(machine(loading, predicted))
    assert (result.status, result.id) == (status, cause)
    assert words in result.summary
    if cause == "load-prediction-differs":
        assert any(line.startswith("predicted") for line in result.details)
    if cause == "glibc-too-old":
        assert result.fix == "move on"


@pytest.mark.parametrize(
    ("end", "cause", "step"),
    [
        ("Permission denied", "library-denied", "namei -l"),
        ("Too many open files", "file-limit", "ulimit -n"),
        ("Stale file handle", "file-system-fails", "Start the program again"),
    ],
)
def test_causes_outside_of_the_install_replace_the_advice_to_reinstall(
    end: str, cause: str, step: str
) -> None:
    reason = f"the kernel library does not load: /a/b.so: cannot open shared object file: {end}"
    failed = replace(BROKEN, stage="kernels", reason=reason)
    result = check_loading(machine(failed, GOOD))
    assert (result.status, result.id) == ("fail", cause)
    assert step in result.fix
    assert "reinstall" not in result.fix


@needs_gcc
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda _: b"", "it is empty"),
        (lambda _: b"MZ" * 64, "not an ELF file"),
        (lambda data: data[: len(data) // 4], "truncated"),
    ],
    ids=["empty", "another file", "cut short"],
)
def test_a_part_that_cannot_be_loaded_is_no_open_question(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    lab = Lab(tmp_path)
    library = lab.build(
        "libflash_dist_kernels.so", define("flash_dist_fwd") + "int big[99999] = {1};"
    )
    library.write_bytes(change(library.read_bytes()))
    predicted = predict_parts(read_torch(), read_libc(), "2.10", tmp_path)
    assert (predicted.status, predicted.stage) == ("failed", "kernels")
    assert reason in predicted.reason
    result = check_loading(machine(predicted))
    assert (result.status, result.id) == ("fail", "kernels-failed")
    assert "--force-reinstall" in result.fix


@needs_gcc
@pytest.mark.parametrize(
    ("number", "status", "fix"),
    [(errno.EACCES, "fail", "`ls -ld`"), (errno.EMFILE, "skip", "`ulimit -n 1024`")],
    ids=["another user's", "too many open files"],
)
def test_a_part_that_may_be_sound_is_not_to_be_installed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, status: str, fix: str
) -> None:
    lab = Lab(tmp_path)
    lab.build("libflash_dist_kernels.so", define("flash_dist_fwd"))
    lab.build("_C.so", define("init"))

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    torch, libc = read_torch(), read_libc()
    host = read_host(torch, libc)
    monkeypatch.setattr("flash_dist.toolkit.loading.parts.read_host", lambda *_: host)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        predicted = predict_parts(torch, libc, "2.10", tmp_path)
    result = check_loading(machine(predicted))
    assert (result.status, predicted.stage) == (status, "kernels")
    assert os.strerror(number) in result.summary
    assert fix in result.fix


def test_a_process_that_does_not_start_is_neither_a_damaged_install_nor_a_wrong_prediction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    result = check_loading(machine(try_loading(), GOOD))
    assert (result.status, result.id) == ("fail", "child-crashed")
    assert "could not be started" in result.summary
    assert f"`{tmp_path / 'python'}`: No such file or directory" in result.summary
    assert "reinstall" not in result.fix


def test_too_few_files_that_may_be_open_are_to_be_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/opt/x")

    monkeypatch.setattr("shutil.disk_usage", refuse)
    result = check_loading(machine(try_loading(), GOOD))
    assert result.summary.endswith("it could not be started: `/opt/x`: Too many open files")
    assert result.fix == "`ulimit -n 1024` lets a process open more files"


def test_a_folder_that_no_encoding_spells_is_not_to_be_installed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("flash_dist.toolkit.loading.parts.PACKAGE", Path("/opt/\udcc3\udcbc"))
    monkeypatch.setattr(
        "flash_dist.toolkit.loading.parts.run_child", lambda *_, **__: Outcome("exit")
    )
    result = check_loading(machine(replace(try_loading(), stage="extension"), GOOD))
    assert result.fix.startswith("`export PYTHONUTF8=1`")


@pytest.mark.parametrize(
    ("outcome", "fix"),
    [
        (Outcome("exit", output=("x.so: failed to map segment from shared object",)), "noexec"),
        (Outcome("signal", "SIGABRT", output=("  what():  std::bad_alloc",)), "more memory"),
        (Outcome("signal", "SIGKILL"), "`ulimit -a` shows the limits"),
    ],
    ids=["a mount or a limit", "no memory", "killed"],
)
def test_limits_of_the_system_are_no_damaged_install(
    monkeypatch: pytest.MonkeyPatch, outcome: Outcome, fix: str
) -> None:
    outcome = replace(outcome, events=({"event": "stage", "stage": "torch"},))
    monkeypatch.setattr("flash_dist.toolkit.loading.parts.run_child", lambda *_, **__: outcome)
    result = check_loading(machine(try_loading(), GOOD))
    assert (result.status, result.id) == ("fail", "torch-crashed")
    assert fix in result.fix
    assert "reinstall" not in result.fix


@pytest.mark.parametrize("broken", ["absent", "full"])
def test_no_room_for_a_report_is_said_before_anything_is_blamed(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "absent":
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    else:
        usage = shutil.disk_usage(tmp_path)._replace(free=4096)
        monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    result = check_loading(machine(try_loading(), GOOD))
    reason = "No such file or directory" if broken == "absent" else "No space left on device"
    assert reason in result.summary
    assert "TMPDIR" in result.fix


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "LD_PRELOAD"])
def test_the_loaders_variables_are_suspected_before_the_install(name: str) -> None:
    suspect = replace(machine(BROKEN, GOOD), variables={name: "/opt/old"})
    assert check_loading(suspect).fix.startswith(f"`unset {name}` and try again; otherwise `pip")


def test_a_folder_that_is_gone_is_to_be_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(
        "flash_dist.toolkit.loading.parts.run_child", lambda *_, **__: Outcome("exit")
    )
    result = check_loading(machine(replace(try_loading(), stage="torch"), GOOD))
    assert result.id == "torch-crashed"
    assert result.fix.startswith("`cd /` and run it again")


def test_without_torch_the_prediction_is_no_second_failure() -> None:
    absent = Torch("absent", reason="torch is not installed")
    loading = Loading("failed", "torch", "torch is not installed", "predicted", TORCH_ABSENT)
    result = check_loading(replace(machine(loading), torch=absent))
    assert (result.status, result.id) == ("skip", "extension-needs-torch")
    assert "should load" in result.summary


def test_the_source_of_the_answer_is_in_the_json() -> None:
    data = json.loads(json.dumps(machine(GOOD).to_json()))
    assert (data["loading"]["source"], data["predicted_loading"]) == ("predicted", None)
    data = json.loads(json.dumps(machine(TRIED, BAD).to_json()))
    assert data["loading"]["source"] == "tried"
    assert data["predicted_loading"]["id"] == "glibc-too-old"


def test_only_a_selftest_that_runs_spares_the_child_that_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = machine(GOOD)
    assert will_run(served)
    assert not will_run(machine(BAD))
    assert not will_run(replace(served, cuda=Cuda("absent")))
    assert not will_run(replace(make_environment(HOPPER, "8.6"), loading=GOOD))
    monkeypatch.setattr("flash_dist.toolkit.checks.environment.try_loading", lambda: BROKEN)
    proven = prove_loading(served)
    assert (proven.loading, proven.predicted) == (BROKEN, GOOD)
    assert prove_loading(machine(Loading("not-tried"))).loading.status == "not-tried"
    examination = Examination(proven, tuple(examine(proven)))
    assert examination.exit_code() == 1


@pytest.mark.parametrize(
    ("outcome", "differs"),
    [
        (Outcome("exit", "status 1", output=("ImportError: libtorch.so",)), True),
        (Outcome("done", events=({"event": "error", "reason": "does not load"},)), True),
        (Outcome("signal", "SIGSEGV"), True),
        (Outcome("timeout", "after 900 s"), False),
        (Outcome("signal", "SIGABRT", ({"event": "imported"},)), False),
    ],
    ids=["import error", "our error", "crash at import", "timeout", "crash in a kernel"],
)  # fmt: skip
def test_a_selftest_that_cannot_load_contradicts_the_prediction(
    outcome: Outcome, *, differs: bool
) -> None:
    report = judge_outcome("0", 30, outcome)
    result = check_selftest(report)
    compared = compare_selftest(GOOD, report, result)
    assert (compared.id == "load-prediction-differs") == differs
    assert compare_selftest(BAD, report, result) == result
    if differs:
        assert compared.details[-1] == "predicted from symbol tables: everything loads"


@needs_gcc
def test_the_parts_are_predicted_one_after_the_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    torch, libc = read_torch(), read_libc()
    nothing = predict_parts(torch, libc, "2.10", tmp_path)
    assert (nothing.status, nothing.stage) == ("failed", "kernels")
    assert nothing.reason.endswith("No such file or directory")
    lab.build("libflash_dist_kernels.so", define("flash_dist_fwd"))
    lab.build("_C.so", call("torch_call_a_friend"))
    absent = predict_parts(Torch("absent"), libc, "2.10", tmp_path)
    assert (absent.stage, absent.id) == ("torch", "torch-absent")
    if torch.status == "ok":
        loading = predict_parts(torch, libc, "2.10", tmp_path)
        assert (loading.stage, loading.id) == ("extension", "torch-symbol-missing")
        assert loading.fix == "`pip install 'torch>=2.10'`"
        assert loading.source == "predicted"


def make_wheel(folder: Path, name: str, **members: Path) -> str:
    with zipfile.ZipFile(folder / name, "w") as archive:
        for member, path in members.items():
            archive.write(path, f"pkg/{member}.so")
    return str(folder / name)


@needs_gcc
def test_libraries_of_others_that_will_not_load_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab(tmp_path)
    good = lab.build("good.so", define("f"))
    old = lab.build("old.so", call("_ZN2at6friendEv"))
    lost = lab.build("lost.so", define("g"), needs=(lab.build("x/libelsewhere.so", define("h")),))
    name = "pkg-1.0-py3-none-any.whl"

    def loading(*arguments: str) -> list[dict[str, object]]:
        main(["doctor", *arguments, "--json"])
        checks = json.loads(capsys.readouterr().out)["checks"]
        return [check for check in checks if check["name"] == "loading"]

    (lone,) = loading("--wheel", make_wheel(tmp_path, name, lost=lost))
    assert (lone["status"], lone["id"]) == ("warn", "library-missing")
    assert "pkg/lost.so needs `libelsewhere.so`" in str(lone["summary"])
    (spare,) = loading("--wheel", make_wheel(tmp_path, name, lost=lost, good=good))
    assert (spare["status"], spare["id"]) == ("skip", "library-missing")
    assert "1 of 2 libraries will not load here" in str(spare["summary"])
    if read_torch().status == "ok":
        (bad,) = loading("--wheel", make_wheel(tmp_path, name, old=old, good=good))
        assert (bad["status"], bad["id"]) == ("fail", "torch-symbol-missing")
    assert not loading("--wheel", make_wheel(tmp_path, name, good=good))
    (plain,) = loading("--wheel", str(lost))
    assert (plain["status"], plain["id"]) == ("fail", "library-missing")
    assert not loading("--wheel", str(lost), "--gpu", "8.6")  # judges another machine


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("p-1-py3-none-any.whl", ""),
        ("p-1-cp27-cp27mu-manylinux1_{machine}.whl", "python-abi"),
        ("p-1-py3-none-manylinux_2_5_{machine}.manylinux1_{machine}.whl", ""),
        ("p-1-py3-none-manylinux_2_99_{machine}.whl", "glibc-too-old"),
        ("p-1-py3-none-musllinux_1_2_{machine}.whl", "libc-unsupported"),
        ("p-1-py3-none-manylinux_2_28_s390x.whl", "wrong-architecture"),
        ("p-1-py3-none-win_amd64.whl", "wrong-architecture"),
        ("no wheel", ""),
    ],
)
def test_the_tags_of_a_wheel_say_where_it_is_for(name: str, cause: str) -> None:
    host = read_host(read_torch(), read_libc())
    machine_name = {62: "x86_64", 183: "aarch64"}.get(host.linker.platform.machine, "")
    found = judge_tags(name.format(machine=machine_name), host)
    assert (found.id if found else "") == cause


def test_a_wheel_for_all_pythons_is_none_for_a_free_threaded_one() -> None:
    host = replace(read_host(read_torch(), read_libc()), python="3.13t")
    found = judge_tags(
        "m-1-cp310-abi3-manylinux_2_34_x86_64.whl", host, parse_tag("cp313-cp313t-any")
    )
    assert found is not None
    assert found.summary.endswith(".whl is for cp310-abi3, this is Python 3.13t")
    assert found.fix.startswith("use Python 3.13, which has the GIL")
