"""A fleet: odd members, undecidable cases, incomparable members."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_dist.toolkit.doctor import rank
from flash_dist.toolkit.doctor.proof import Proof
from flash_dist.toolkit.doctor.rank import Rank, prove_rank
from flash_dist.toolkit.errors import GroupError, UsageError
from flash_dist.toolkit.findings.proofs import SELFTEST_CRASHED
from flash_dist.toolkit.findings.result import CheckResult
from flash_dist.toolkit.machine.libcuda import Gpu
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.selftest.fingerprints import Fingerprint, Setting
from flash_dist.toolkit.selftest.fleet import Member, compare_members
from flash_dist.toolkit.targets.devices import Device
from tests.unit.made.builds import ALL, make_environment

SETTING = Setting("9.0", 132, 232448)
RIGHT = Fingerprint("odd bf16 d64", "plan", "code", "", {"out": "a", "dk": "b"})
WRONG = replace(RIGHT, digests={"out": "a", "dk": "f"})
FINE = CheckResult("ok", "2 cases", name="selftest 0")


def member(number: int, *prints: Fingerprint, turn: int = 0) -> Member:
    gpu = Gpu(
        number % 2, "NVIDIA H200", Device(9, 0), pci=f"0000:{number:02x}:00.0", uuid=f"GPU-{number}"
    )
    return Member(number, f"node{number // 2}", gpu, SETTING, prints, FINE, turn)


def test_equal_bits_are_fine() -> None:
    (whole,) = compare_members(member(rank, RIGHT) for rank in range(4))
    assert (whole.status, whole.id) == ("ok", "")
    assert whole.summary.startswith("4 ranks on 2 hosts (4 x NVIDIA H200): ")
    assert "1 cases" in whole.summary


def test_the_odd_gpu_is_named_with_host_pci_and_uuid() -> None:
    prints = (RIGHT, RIGHT, WRONG, RIGHT)
    odd, whole = compare_members(member(rank, one) for rank, one in enumerate(prints))
    assert (odd.name, odd.status, odd.id) == ("rank 2", "fail", "fleet-odd-gpu")
    where = "rank 2 on node1, gpu 0 (NVIDIA H200, PCI 0000:02:00.0, GPU-2)"
    assert odd.summary.startswith(f"{where} ")
    assert "dk in `odd bf16 d64`" in odd.summary
    assert "3 others" in odd.summary
    assert (whole.status, whole.id) == ("fail", "fleet-differs")


def test_neither_of_two_different_gpus_is_called_wrong() -> None:
    first, second, whole = compare_members((member(0, RIGHT), member(1, WRONG)))
    assert {first.id, second.id} == {"fleet-disagrees"}
    assert "majority" in first.summary
    assert not whole


def test_rounds_tell_which_of_two_is_wrong() -> None:
    members = [member(rank, RIGHT, turn=turn) for rank in range(2) for turn in range(3)]
    members[4] = member(1, WRONG, turn=1)
    odd, _ = compare_members(members)
    assert (odd.name, odd.id) == ("rank 1", "fleet-odd-gpu")
    assert odd.details[-1] == "in rounds 2"


@pytest.mark.parametrize(
    "other",
    [
        replace(WRONG, code="other"),
        replace(WRONG, driver="580"),
        replace(WRONG, plan="another"),
        replace(WRONG, case="other"),
    ],
)
def test_fingerprints_of_different_settings_are_not_compared(other: Fingerprint) -> None:
    (whole,) = compare_members((member(0, RIGHT), member(1, other)))
    assert (whole.status, whole.id) == ("warn", "fleet-nothing-to-compare")


def test_another_kind_of_gpu_is_not_compared() -> None:
    other = replace(member(1, WRONG), setting=replace(SETTING, sm_count=114))
    (whole,) = compare_members((member(0, RIGHT), other))
    assert whole.id == "fleet-nothing-to-compare"


def test_a_rank_whose_selftest_fails_is_named() -> None:
    dead = CheckResult(
        "fail", "it was killed by SIGABRT", entry=SELFTEST_CRASHED, name="selftest 1"
    )
    failed, whole = compare_members(
        (member(0, RIGHT), replace(member(1), result=dead), member(2, RIGHT))
    )
    assert (failed.name, failed.id) == ("rank 1", "selftest-crashed")
    assert "node0, gpu 1" in failed.summary
    assert whole.status == "warn"


def test_without_torchrun_a_fleet_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UsageError, match="must be started by torchrun, got no RANK"):
        Rank.of_environment()


def test_a_rank_that_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    assert Rank.of_environment() == Rank(0, 0, 0)
    monkeypatch.setenv("LOCAL_RANK", "-1")
    with pytest.raises(UsageError, match="LOCAL_RANK must be a number, got `-1`"):
        Rank.of_environment()


def test_a_fleet_without_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Torch("absent", reason="torch is not installed")
    monkeypatch.setattr(rank, "read_torch", lambda: absent)
    with pytest.raises(GroupError, match="torch is not installed") as caught:
        rank.join_ranks(Rank(0, 0, 1), "gloo")
    assert caught.value.hint == "`pip install 'torch>=2.10'`"


def test_ranks_that_cannot_meet_are_told_why(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "nowhere")
    with pytest.raises(
        GroupError, match=r"rank 0 of 1 cannot join its fleet with gloo: .*'nowhere'"
    ):
        rank.join_ranks(Rank(0, 0, 1), "gloo")


def test_nccl_without_a_gpu_names_the_backend_that_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(GroupError, match="needs a GPU that torch can use") as caught:
        rank.join_ranks(Rank(0, 0, 1), "nccl")
    assert caught.value.hint == "`--backend gloo` needs none"


class OneGoodRound(Proof):
    """Computes in its first round and crashes in the next."""

    def run(self, gpu: Gpu) -> CheckResult:
        if self.proven:
            message = "the GPU fell off the bus"
            raise OSError(message)
        self.proven.append((gpu, SETTING, (RIGHT,)))
        return FINE


def test_a_round_that_crashes_does_not_count_with_the_bits_of_the_round_before() -> None:
    environment, rank = make_environment(ALL, "9.0"), Rank(0, 0, 1)
    proof = OneGoodRound(environment, runs=1, timeout=1)
    first, second = (prove_rank(rank, environment, proof, runs=1) for _ in range(2))
    assert (first.setting, first.fingerprints) == (SETTING, (RIGHT,))
    assert (second.fingerprints, second.result.id) == ((), "check-crashed")
