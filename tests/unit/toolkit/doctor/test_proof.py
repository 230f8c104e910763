"""GPU data that a proof keeps beside the selftest results."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from flash_dist.toolkit.doctor.proof import Proof
from flash_dist.toolkit.errors import FatbinError
from flash_dist.toolkit.selftest.report import CaseDigests, CasePlan, SelftestReport
from tests.unit.made.builds import HOPPER, make_environment

READER = "flash_dist.toolkit.doctor.proof.read_kernels"


def test_the_code_of_the_kernels_that_ran_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = make_environment(HOPPER, "9.0")
    hashes = {"ran": "code", "did_not": "code"}
    monkeypatch.setattr(READER, lambda _: hashes)
    proof = Proof(machine, runs=1, timeout=1.0, references=())
    digests = CaseDigests("one", CasePlan("plan", ("ran",)), {"out": "bits"})
    report = SelftestReport("0", 1, 1, selected={"fwd bf16 64": "did_not"}, digests=(digests,))
    proof.compare(machine.cuda.gpus[0], report)
    (reference,) = proof.record("2026-11-23")
    assert reference.kernels == {"ran": "code"}
    assert [one.plan for one in reference.fingerprints] == ["plan"]


def test_code_that_cannot_be_read_is_said_and_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = FatbinError("no zstd here")
    machine = make_environment(HOPPER, "9.0")
    monkeypatch.setattr(READER, Mock(side_effect=problem))
    proof = Proof(machine, runs=1, timeout=1.0, references=())
    agreement = proof.compare(machine.cuda.gpus[0], SelftestReport("0", 1, 1))
    assert agreement
    assert "needs the code: no zstd here" in agreement.sentence
    assert agreement.to_json()["unread"] == "no zstd here"
    with pytest.raises(FatbinError, match="no zstd here"):
        proof.require_kernels()
