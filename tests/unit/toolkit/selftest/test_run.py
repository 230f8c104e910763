"""The selftest: inputs, comparison, reference, cases, and the result of a child that dies."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import tests.reference
import tests.scores
from flash_dist.kernels.scores import Scores
from flash_dist.proof.cases import WHOLE, Case, Kernels, make_cases
from flash_dist.proof.inputs import Inputs
from flash_dist.proof.masks import MASKS, find_visible
from flash_dist.proof.reference import allowed_error, attend
from flash_dist.proof.selftest import CPU_KERNELS, AttentionCase, find_kernels
from flash_dist.toolkit.errors import ExtensionError
from flash_dist.toolkit.loading import process
from flash_dist.toolkit.loading.process import Outcome, read_events, run_child
from flash_dist.toolkit.selftest.child import run_cases
from flash_dist.toolkit.selftest.comparison import (
    Difference,
    compare_bits,
    compare_values,
    digest,
    find_bit_difference,
    hash_bits,
    make_values,
)
from flash_dist.toolkit.selftest.run import check_selftest, find_surprises, judge_outcome

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from flash_dist.masks import BlockMask
    from flash_dist.toolkit.findings.result import CheckResult
    from flash_dist.toolkit.selftest.report import SelftestReport

NO_RUNS = 30
KINDS = ("softcap", "alibi", "bias", "sinks")
CASES = make_cases([Kernels("fp16", 32, 32), Kernels("fp32", 64, 64)], 0)


def textbook(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    causal: bool,
    mask: BlockMask | None,
    lengths: tuple[int, ...],
    scores: Scores,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in float32 with torch's own gradients: an implementation to test."""
    q, k, v = inputs
    group = q.shape[2] // k.shape[2]
    s = torch.einsum("bqhd,bkhd->bhqk", q.float(), k.float().repeat_interleave(group, 2))
    s = s * q.shape[-1] ** -0.5
    if scores.softcap:
        s = scores.softcap * torch.tanh(s / scores.softcap)
    if scores.alibi_slopes is not None:
        i, j = torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])
        distance = (i + s.shape[-1] - s.shape[-2] - j).abs()
        s = s - scores.alibi_slopes[..., None, None] * distance
    if scores.bias is not None:
        s = s + scores.bias
    visible = torch.ones(s.shape[-2:], dtype=torch.bool)
    if causal:
        visible = visible.tril(k.shape[1] - q.shape[1])
    if mask is not None:
        visible = mask.visible(*s.shape)
    if lengths:
        visible &= torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
    s = s.masked_fill(~visible, -math.inf)
    if scores.sinks is not None:
        s = torch.cat((s, scores.sinks[:, None, None].expand(*s.shape[:-1], 1)), dim=-1)
    lse = torch.logsumexp(s, dim=-1)
    dead = torch.isneginf(lse)
    p = torch.exp(s - lse.masked_fill(dead, 0.0).unsqueeze(-1))[..., : k.shape[1]]
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.float().repeat_interleave(group, 2))
    return out.to(q.dtype), lse


def run_on_cpu(attention: Any, runs: int = 3) -> list[dict[str, Any]]:  # noqa: ANN401
    events: list[dict[str, Any]] = []
    cases = [AttentionCase(case, attention) for case in CASES]
    run_cases(cases, torch.device("cpu"), runs, events.append)
    return events


def findings(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "finding"]


def test_the_hash_gives_the_same_bits_for_ever() -> None:
    # lowbias32 in plain Python, with its published constants
    def mix(x: int) -> int:
        x = ((x ^ x >> 16) * 0x7FEB352D) % (1 << 32)
        x = ((x ^ x >> 15) * 0x846CA68B) % (1 << 32)
        return x ^ x >> 16

    assert hash_bits(7, 5).tolist() == [mix(index ^ mix(7)) for index in range(5)]
    assert hash_bits(1, 3).tolist() == [1492470133, 3529208806, 3405767568]


def test_values_are_spread_over_the_scale_and_differ_by_seed() -> None:
    values = make_values(1, (64, 64), torch.float32, scale=4.0)
    assert -4.0 <= float(values.min()) < -3.9
    assert 3.9 < float(values.max()) < 4.0
    assert abs(float(values.mean())) < 0.1
    assert not torch.equal(values, make_values(2, (64, 64), torch.float32, scale=4.0))


def test_a_planted_difference_is_found_with_coordinate_values_and_count() -> None:
    expected = torch.zeros(2, 3, 4, dtype=torch.float16)
    actual = expected.clone()
    actual[1, 0, 2] = 0.5
    actual[1, 2, 3] = math.nan
    difference = find_bit_difference("dq", expected, actual)
    assert difference is not None
    assert (difference.coordinate, difference.count, difference.total) == ((1, 0, 2), 2, 24)
    assert str(difference) == (
        "dq differs in 2 of 24 elements, first at [1, 0, 2]: 0.5 instead of 0.0"
    )


def test_bits_are_compared_not_values() -> None:
    nan = torch.full((3,), math.nan, dtype=torch.bfloat16)
    zero = torch.zeros(3)
    assert compare_bits({"out": nan, "lse": zero}, {"out": nan.clone(), "lse": zero}) == ()
    assert compare_bits({"lse": zero}, {"lse": -zero})[0].count == 3


def test_tensors_of_another_shape_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"out is torch.float32 \[3\], not torch.float32 \[2\]"):
        find_bit_difference("out", torch.zeros(2), torch.zeros(3))


def test_a_difference_with_nan_becomes_valid_json() -> None:
    difference = find_bit_difference("lse", torch.zeros(1), torch.full((1,), math.nan))
    assert difference is not None
    text = json.dumps(difference.to_json(), allow_nan=False)
    assert json.loads(text)["actual"] == "nan"


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_reference_agrees_with_autograd(*, causal: bool) -> None:
    q, dout = (make_values(seed, (2, 9, 4, 16), torch.float64) for seed in (1, 2))
    k, v = (make_values(seed, (2, 6, 2, 16), torch.float64) for seed in (3, 4))
    exact = attend((q, k, v, dout), causal=causal, dtype=torch.float64)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    group = [x.repeat_interleave(2, 2) for x in inputs[1:]]
    scores = torch.einsum("bqhd,bkhd->bhqk", inputs[0], group[0]) / 4
    if causal:
        visible = torch.ones(9, 6, dtype=torch.bool).tril(-3)
        scores = scores.masked_fill(~visible, -1e30)
    p = torch.softmax(scores, -1)
    if causal:
        p = p * visible
    out = torch.einsum("bhqk,bkhd->bqhd", p, group[1])
    gradients = torch.autograd.grad(out, inputs, dout)
    for name, expected in zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True):
        torch.testing.assert_close(exact[name], expected)
    if causal:
        assert torch.isneginf(exact["lse"][:, :, :3]).all()
        assert not exact["out"][:, :3].any()


@pytest.mark.parametrize("words", [*KINDS, "softcap alibi sinks", "alibi bias sinks"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_reference_bends_scores_as_the_formula_does(words: str, *, causal: bool) -> None:
    case = Case("", 2, 9, 6, 4, 2, causal=causal, scores=words, dtype="fp32", head_dim=16)
    inputs = Inputs.make(case, torch.device("cpu"))
    exact = inputs.attend_exactly(case, torch.float64)
    dlse = torch.zeros(2, 4, 9)
    problem = tests.reference.Problem(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.dout,
        torch.ones(9, 6, dtype=torch.bool).tril(-3)[None, None] if causal else None,
        dlse=dlse,
    )
    wanted = tests.scores.compute(
        tests.scores.Scored(problem, **inputs.scores._asdict()), torch.float64
    )
    assert exact.keys() == wanted.keys() | {"max_logit"}
    for name, values in wanted.items():
        torch.testing.assert_close(exact[name], values)


def compare(
    exact: dict[str, torch.Tensor], baseline: dict[str, torch.Tensor], *actual: float
) -> tuple[Difference, ...]:
    """Compare the only tensor of a result."""
    ((name, reference),) = exact.items()
    allowed = {name: allowed_error(name, reference, baseline[name])}
    return compare_values(exact, allowed, {name: torch.tensor(actual)})


def test_values_may_err_twice_as_much_as_half_precision_and_no_more() -> None:
    exact = {"out": torch.tensor([1.0, 2.0], dtype=torch.float64)}
    baseline = {"out": torch.tensor([1.25, 2.0], dtype=torch.bfloat16)}
    assert compare(exact, baseline, 1.5, 1.5) == ()
    assert compare(exact, baseline, 1.0, 2.6)[0].coordinate == (1,)
    assert compare(exact, baseline, math.nan, 2.0)[0].count == 1


def test_float32_may_err_by_a_ten_thousandth_of_the_largest_value() -> None:
    exact = {"out": torch.tensor([0.0, 2.0], dtype=torch.float64)}
    baseline = {"out": torch.tensor([0.0, 2.0])}
    assert compare(exact, baseline, 1.9e-4, 2.0) == ()
    assert compare(exact, baseline, 2.1e-4, 2.0)[0].count == 1


def test_equal_infinities_are_equal_values() -> None:
    lse = {"lse": torch.tensor([-math.inf, 0.0], dtype=torch.float64)}
    assert compare(lse, lse, -math.inf, 0.0) == ()
    assert compare(lse, lse, math.inf, 0.0)[0].count == 1


def test_cases_cover_each_kernel_small_odd_and_filling_the_gpu() -> None:
    kernels = [Kernels("fp16", 64, 64), Kernels("bf16", 128, 128)]
    cases = make_cases(kernels, 132)
    assert {case.dtype for case in cases} == {"fp16", "bf16"}
    assert {case.head_dim for case in cases} == {56, 64, 120, 128}
    assert {case.causal for case in cases} == {True, False}
    assert any(case.num_heads_q != case.num_heads_kv for case in cases)
    assert any(case.seqlen_q == 1 for case in cases)
    assert any(case.causal and case.seqlen_q > case.seqlen_k for case in cases)
    assert {case.budget for case in cases} >= {None, 0}
    full = next(case for case in cases if case.label == "full")
    blocks = full.batch * full.num_heads_kv * math.ceil(full.seqlen_k / 128)
    assert blocks >= 2 * 132
    assert len({case.name for case in cases}) == len(cases)


def test_keys_are_read_from_caches_whole_in_pages_and_as_they_are_appended() -> None:
    cases = [case for case in make_cases([Kernels("bf16", 128, 128)], 132) if case.page]
    assert {case.page == WHOLE for case in cases} == {True, False}
    assert {case.appended != 0 for case in cases} == {True, False}
    assert all(case.appended in {0, case.seqlen_q} for case in cases)


def test_latent_keys_have_cases_of_their_own_whole_and_in_pages() -> None:
    kernels = Kernels("bf16", 576, 512)
    cases = make_cases([kernels], 132)
    assert {case.page == WHOLE for case in cases} == {True, False}
    assert {case.fills_gpu for case in cases} == {True, False}
    assert all(case.latent for case in cases)
    small, *_ = make_cases([kernels], 0)
    inputs = Inputs.make(small, torch.device("cpu"))
    assert torch.equal(inputs.v, inputs.k[..., :512])


def test_every_kind_of_mask_and_packed_documents_are_covered() -> None:
    cases = make_cases([Kernels("bf16", 128, 128)], 132)
    planned = {case.mask for case in cases}
    assert planned == {"", *MASKS}, "selftest/masks.py makes them, selftest/cases.py names them"
    assert {case.causal for case in cases if case.lengths} == {True, False}
    assert {case.fills_gpu for case in cases if case.mask} == {True, False}
    for case in cases:
        assert sum(case.lengths) in {0, case.seqlen_q}
        if case.mask and not case.fills_gpu:
            visible = find_visible(case)
            assert visible is not None
            assert visible.any()
            assert not visible.all()


@pytest.mark.parametrize("head_dim", [64, 192], ids=["usual", "other"])
def test_all_that_becomes_of_scores_is_covered(head_dim: int) -> None:
    kernels = Kernels("bf16", head_dim, head_dim)
    cases = [one for one in make_cases([kernels], 132) if one.scores and not one.dropout_p]
    assert {word for case in cases for word in case.scores.split()} == set(KINDS)
    assert {case.fills_gpu for case in cases} == {True, False}
    assert any(case.causal and case.seqlen_q > case.seqlen_k for case in cases)
    assert {bool(case.mask) for case in cases} == {False, kernels.is_usual}
    assert {bool(case.lengths) for case in cases} == {False, kernels.is_usual}
    assert {case.budget == 0 for case in cases} == {False, kernels.is_usual}
    assert any(case.page for case in cases) == kernels.reads_caches


@pytest.mark.parametrize("head_dim", [64, 192], ids=["usual", "other"])
def test_dropout_is_covered_with_what_has_kernels_of_its_own(head_dim: int) -> None:
    kernels = Kernels("bf16", head_dim, head_dim)
    cases = [case for case in make_cases([kernels], 132) if case.dropout_p]
    assert {"bias", "alibi", ""} == {case.scores for case in cases}
    assert {case.fills_gpu for case in cases} == {False, kernels.is_usual}
    assert {case.budget for case in cases} == {None, 0}
    assert any(case.mask for case in cases)
    assert not any(case.dropout_p for case in make_cases([Kernels("bf16", 512, 512)], 132))


def test_the_largest_score_of_each_head_is_found_by_both_kinds_of_kernels() -> None:
    cases = make_cases([Kernels("bf16", 128, 128), Kernels("fp32", 192, 192)], 132)
    small, wide, other = (case for case in cases if case.max_logit)
    assert not any(case.fills_gpu for case in (small, wide, other))
    # tiles of 192 and 128 queries are filled, and are more than half as many as multiprocessors
    assert wide.seqlen_q % math.lcm(192, 128) == 0
    assert wide.seqlen_q // 192 * wide.num_heads_q > 132 / 2
    inputs = Inputs.make(small, torch.device("cpu"))
    found = inputs.attend_exactly(small, torch.float64)["max_logit"]
    q, k = inputs.q[0].double(), inputs.k[0].double().repeat_interleave(2, 1)
    s = torch.einsum("qhd,khd->hqk", q, k) * small.head_dim**-0.5
    visible = torch.ones(s.shape[1:]).tril(s.shape[2] - s.shape[1]).bool()
    torch.testing.assert_close(found, s.masked_fill(~visible, -math.inf).amax((1, 2)))


def test_a_digest_is_half_the_sha_256_of_the_elements() -> None:
    values = torch.arange(6, dtype=torch.int32).view(2, 3).t()
    digests = digest({"out": values, "lse": torch.empty(0)})
    words = b"".join(i.to_bytes(4, "little") for i in (0, 3, 1, 4, 2, 5))
    assert digests["out"] == hashlib.sha256(words).hexdigest()[:32]
    assert digests["lse"] == hashlib.sha256(b"").hexdigest()[:32]


def test_other_sizes_get_few_cases() -> None:
    many = len(make_cases([Kernels("fp16", 64, 64)], 132))
    few = make_cases([Kernels("fp16", 192, 128)], 132)
    assert len(few) < many / 2
    assert any(case.fills_gpu for case in few)
    assert {case.budget for case in few} == {None, 0}
    assert {(case.head_dim, case.v_shape[3]) for case in few} == {(192, 128), (184, 120)}


def test_on_the_cpu_only_small_cases_run() -> None:
    assert not any(case.fills_gpu for case in make_cases(CPU_KERNELS, 0))


def test_only_kernels_that_are_complete_are_tested() -> None:
    selected = [
        {"role": "fwd", "dtype": "fp16", "head_dim": 64, "chosen": {"symbol": "a"}},
        {"role": "bwd", "dtype": "fp16", "head_dim": 64, "chosen": {"symbol": "b"}},
        {"role": "bwd", "dtype": "fp16", "head_dim": 96, "chosen": {"symbol": "b"}},
        {"role": "fwd", "dtype": "bf16", "head_dim": 64, "chosen": {"symbol": "c"}},
        {"role": "bwd", "dtype": "bf16", "head_dim": 64, "chosen": None},
        {"role": "mla", "dtype": "bf16", "head_dim": 576, "chosen": {"symbol": "d"}},
        {"role": "fwd", "dtype": "bf16", "head_dim": 48, "chosen": {"symbol": "e"}},
        {"role": "fwd", "dtype": "fp16", "head_dim": 48, "chosen": {"symbol": "f"}},
    ]
    sized = [{"head_dim_v": kernel["head_dim"], **kernel} for kernel in selected]
    assert find_kernels(sized) == (
        Kernels("bf16", 576, 576),
        Kernels("fp16", 48, 48),
        Kernels("fp16", 64, 64),
    )  # the bf16 backward of 64, which fails to load, would also serve 48


def test_a_correct_implementation_passes() -> None:
    events = run_on_cpu(textbook)
    assert findings(events) == []
    assert events[-1] == {"event": "done"}
    report = judge_outcome("cpu", 3, Outcome("done", events=tuple(events)))
    assert report
    assert report.cases == len(CASES)


def test_one_flipped_bit_in_one_run_is_found() -> None:
    calls = 0

    def flaky(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        nonlocal calls
        calls += 1
        out, lse = textbook(*tensors, **options)
        if calls == 5:  # second run of the second case
            lse = lse.clone()
            lse.view(torch.int32)[0, 0, 3] ^= 1
        return out, lse

    events = run_on_cpu(flaky)
    (finding,) = findings(events)
    assert finding["id"] == "selftest-bits-differ"
    assert finding["case"].startswith("masked-rows fp16")
    assert finding["run"] == 1
    assert finding["difference"]["coordinate"] == [0, 0, 3]
    assert finding["difference"]["count"] == 1
    report = judge_outcome("cpu", 3, Outcome("done", events=tuple(events)))
    assert not report
    assert "1 of 2 repeated runs" in report.findings[0].details[0]


@pytest.mark.parametrize("ignored", Scores._fields)
def test_who_leaves_scores_as_they_are_is_found(ignored: str) -> None:
    def deaf(*tensors: Any, scores: Scores, **options: Any) -> Any:  # noqa: ANN401
        nothing: dict[str, Any] = {ignored: 0.0 if ignored == "softcap" else None}
        out, lse = textbook(*tensors, scores=scores._replace(**nothing), **options)
        trained = [x for x in (scores.sinks, scores.bias) if x is not None]
        return out + sum(0.0 * x.sum() for x in trained), lse  # so that they have a gradient

    found = findings(run_on_cpu(deaf, runs=1))
    named = {finding["case"] for finding in found}
    word = ignored.removesuffix("_slopes")
    assert named == {case.name for case in CASES if word in case.scores.split()}


def test_wrong_values_are_found_even_if_always_the_same() -> None:
    def biased(*tensors: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: ANN401
        out, lse = textbook(*tensors, **options)
        return out * 1.02, lse

    found = findings(run_on_cpu(biased))
    assert {finding["id"] for finding in found} == {"selftest-values-differ"}
    assert {finding["difference"]["tensor"] for finding in found} >= {"out", "dq"}


CASE_THEN = """
import json, os, sys, time
report = open(sys.argv[sys.argv.index("--report") + 1], "w")
print(json.dumps({"event": "case", "case": "odd fp16"}), file=report, flush=True)
print("FATAL: from the device", flush=True)
"""


@pytest.mark.parametrize(
    ("code", "cause", "said"),
    [
        ("os.abort()", "selftest-crashed", "SIGABRT"),
        ("os._exit(1)", "selftest-crashed", "status 1"),
        ("os._exit(0)", "selftest-crashed", "ended normally"),
        ('report.write(\'{"event": "ca\'); report.flush(); os.abort()', "selftest-crashed", "SIG"),
    ],
    ids=["abort", "exit", "silent", "cut-short"],
)
def test_a_child_that_dies_is_a_finding(code: str, cause: str, said: str) -> None:
    require_finding(run_child([sys.executable, "-c", CASE_THEN + code], timeout=600), cause, said)


def test_a_child_that_hangs_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timeout counts from the child's last output, however late the output comes."""
    now = [0.0]
    monkeypatch.setattr(process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    command = [sys.executable, "-c", CASE_THEN + "time.sleep(600)"]
    child = process.watch_child(command, timeout=0.7)
    for report in watch(outcomes := list[Outcome](), child):
        said = report.with_name("output.txt")
        if read_events(report) and b"FATAL" in said.read_bytes():
            now[0] = 1.0
        time.sleep(0.01)
    require_finding(outcomes[0], "selftest-timeout", "still running after 0.7 s")


def watch(outcomes: list[Outcome], child: Generator[Path, None, Outcome]) -> Iterator[Path]:
    """Yield the report while the child runs, then keep its outcome."""
    outcomes.append((yield from child))


def require_finding(outcome: Outcome, cause: str, said: str) -> None:
    report = judge_outcome("0", NO_RUNS, outcome)
    assert not report
    assert report.findings[-1].id == cause
    assert said in report.findings[-1].summary
    assert report.findings[-1].case == "odd fp16"
    assert "FATAL: from the device" in report.findings[-1].details


def test_an_exception_in_the_child_is_a_finding() -> None:
    events = ({"event": "error", "reason": "ExtensionError: no library\nmore"},)
    report = judge_outcome("0", NO_RUNS, Outcome("done", events=events))
    assert report.findings[0].id == "selftest-error"
    assert report.summary == "ExtensionError: no library"


def present(ending: str, *events: dict[str, Any], output: tuple[str, ...] = ()) -> CheckResult:
    endings: dict[str, Outcome] = {
        "exit": Outcome("exit", "status 1", events, output),
        "timeout": Outcome("timeout", "after 1 s", events, output),
        "done": Outcome("done", "", events, output),
    }
    return check_selftest(judge_outcome("cpu", NO_RUNS, endings[ending]))


def test_a_jit_variable_is_blamed_before_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_FORCE_PTX_JIT", "1")
    assert present("exit", CASE).fix.startswith("run `unset CUDA_FORCE_PTX_JIT`")
    monkeypatch.delenv("CUDA_FORCE_PTX_JIT")
    monkeypatch.setenv("CUDA_DISABLE_PTX_JIT", "1")
    assert present("exit", CASE).fix.startswith("run `unset CUDA_DISABLE_PTX_JIT`")


CASE = {"event": "case", "case": "odd fp16"}


@pytest.mark.parametrize(
    ("ending", "events", "fix"),
    [
        ("exit", (), "`python -m flash_dist doctor`"),
        ("done", ({"event": "error", "reason": "no library"},), "`python -m flash_dist doctor`"),
        ("exit", (CASE,), "do not use this device with this build"),
        ("timeout", (), "selftest --timeout 3600`"),
        ("timeout", (CASE,), "selftest --timeout 3600`"),
    ],
    ids=["no start", "error", "crash", "early timeout", "timeout"],
)
def test_the_fix_is_for_what_went_wrong(
    ending: str, events: tuple[dict[str, Any], ...], fix: str
) -> None:
    assert fix in present(ending, *events).fix


def test_a_finding_is_said_once() -> None:
    result = present("exit", output=("Traceback:", "  import torch", "ImportError: libtorch.so"))
    assert result.summary.endswith("did not start: ImportError: libtorch.so")
    assert (result.id, result.details) == ("selftest-crashed", ())
    result = present("exit", CASE, output=("FATAL",))
    assert result.summary == ("the child process did not finish: it ended with status 1 (odd fp16)")
    assert result.details == ("FATAL",)
    finding = {
        "event": "finding", "id": "selftest-values-differ", "case": "odd fp16", "run": 0,
        "summary": "out is wrong", "difference": None,
    }  # fmt: skip
    one = present("done", CASE, finding, {"event": "done"})
    assert (one.summary, one.details) == ("out is wrong (odd fp16)", ())
    two = present("done", CASE, finding, {**finding, "summary": "dq is wrong"}, {"event": "done"})
    assert two.summary == "out is wrong (odd fp16); 1 more finding"
    assert two.details == ("odd fp16: out is wrong", "odd fp16: dq is wrong")


def test_a_child_that_ran_no_case_proves_nothing() -> None:
    with pytest.raises(ExtensionError, match="no complete set of kernels"):
        run_cases((), torch.device("cpu"), 2, print)


def loaded_report() -> SelftestReport:
    variants = {
        "fwd": {"symbol": "flash_dist_fwd_x_compute80", "binary_version": 90, "ptx_version": 80},
        "delta": {"symbol": "flash_dist_d_x_compute80", "binary_version": 90, "ptx_version": 80},
    }
    chosen = {"symbol": "flash_dist_fwd_x_compute80"}
    events = (
        {
            "event": "selected",
            "kernels": [
                {"role": "fwd", "dtype": "fp16", "head_dim": d, "head_dim_v": 64, "chosen": one}
                for d, one in ((64, chosen), (96, None))
            ],
        },
        {"event": "case", "case": "odd"},
        {"event": "case-done", "case": "odd"},
        {"event": "loaded", "variants": variants},
        {"event": "done"},
    )
    return judge_outcome("1", NO_RUNS, Outcome("done", events=events, seconds=3.0))


def test_the_variants_that_really_loaded_are_reported() -> None:
    report = loaded_report()
    assert str(report.loaded[1]) == ("flash_dist_fwd_x_compute80: binaryVersion 90, ptxVersion 80")
    result = check_selftest(report)
    assert result.status == "ok"
    assert result.background == ("2 variants ran: binaryVersion 90, ptxVersion 80",)
    assert result.data["loaded"][0]["ptx_version"] == 80


def test_another_variant_than_predicted_is_a_warning() -> None:
    report = loaded_report()
    right = {"fwd fp16 64": "flash_dist_fwd_x_compute80"}
    assert find_surprises(right, report) == ()
    surprises = find_surprises({"fwd fp16 64": "flash_dist_fwd_x_sm90a"}, report)
    result = check_selftest(report, surprises)
    assert (result.status, result.id) == ("warn", "prediction-differs")
    assert "predicted flash_dist_fwd_x_sm90a" in surprises[0]


def test_a_role_that_no_case_launched_is_named() -> None:
    report = replace(loaded_report(), roles=())
    assert report.untested == ("fwd",)
    (untested,) = check_selftest(report).details
    assert untested.startswith("no case launched")
    assert untested.endswith(" fwd")


def test_a_report_becomes_json() -> None:
    data = json.loads(json.dumps(loaded_report().to_json()))
    assert (data["device"], data["status"], data["cases"]) == ("1", "ok", 1)


def test_lines_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    report = tmp_path / "report"
    report.write_text('{"event": "case"}\n[1]\nnonsense\n{"event": "d')
    assert read_events(report) == [{"event": "case"}]
    assert read_events(tmp_path / "absent") == []


def test_a_case_is_named_in_full() -> None:
    case = Case("odd", 2, 37, 53, 3, 1, causal=True, dtype="fp16", head_dim=64)
    assert case.name == "odd fp16 d64 b2 q37 k53 h3/1 causal"
    scored = replace(case, scores="softcap alibi")
    assert scored.name == "odd fp16 d64 b2 q37 k53 h3/1 causal softcap alibi"
