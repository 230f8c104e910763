"""What a proof keeps of a GPU beside the results of its selftest."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flash_dist.toolkit.doctor.proof import Proof
from flash_dist.toolkit.selftest.fingerprints import Identity
from flash_dist.toolkit.selftest.report import CaseDigests, SelftestReport
from tests.unit.made.builds import HOPPER, make_environment

KEY = ("fwd", "bf16", 64, 64)


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
def test_the_code_of_what_serves_bent_scores_is_recorded_with_their_cases(
    monkeypatch: pytest.MonkeyPatch, *, scored: bool
) -> None:
    machine = make_environment(HOPPER, "9.0")
    build = machine.installed.build
    assert build is not None
    general = next(v for v in build.variants if v.key == KEY and v.arch.suffix == "a")
    symbol = general.symbol.replace("fwd_", "fwd_scored_sm90_")
    other = replace(general, symbol=symbol, family="fwd_scored_sm90")
    built = replace(build, variants=(*build.variants, other))
    machine = replace(machine, installed=replace(machine.installed, build=built))
    identity = Identity({v.symbol: "code" for v in built.variants}, "planner")
    monkeypatch.setattr("flash_dist.toolkit.doctor.proof.read_identity", lambda _: identity)

    proof = Proof(machine, runs=1, timeout=1.0, references=())
    digests = CaseDigests("one", ["bf16", "64"], 0, {"out": "bits"}, scored=scored)
    selected = {"fwd bf16 64": general.symbol}
    report = SelftestReport("0", 1, 1, selected=selected, digests=(digests,))
    proof.compare(machine.cuda.gpus[0], report)
    (reference,) = proof.record("2026-11-23")
    assert (symbol in reference.kernels) == scored
    assert general.symbol in reference.kernels
