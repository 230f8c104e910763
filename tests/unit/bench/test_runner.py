"""Measuring on the CPU, with eager attention in place of our kernels."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.bench.baselines import table
from flash_dist.bench.baselines.eager import make_eager
from flash_dist.bench.baselines.failures import CannotRun, describe_failure, is_fatal
from flash_dist.bench.baselines.flex import make_mask_mod
from flash_dist.bench.baselines.names import OURS, OURS_DETERMINISTIC, PASSES
from flash_dist.bench.baselines.ours import mask_arguments
from flash_dist.bench.baselines.problem import Problem
from flash_dist.bench.baselines.sdpa import _explain
from flash_dist.bench.baselines.shapes import CAUSAL, FULL, Mask, Shape
from flash_dist.bench.measuring import checks
from flash_dist.bench.measuring.agreement import compute, measure_against_float64, measure_errors
from flash_dist.bench.measuring.checks import _is_runtime, shorten
from flash_dist.bench.measuring.timing import ROUNDS
from flash_dist.bench.plan import Plan
from flash_dist.bench.runner import ContextLostError, measure
from tests.unit.made.host_clock import HostClock
from tests.unit.made.told_clock import LONG_MS, SHORT_MS, ToldHostClock, tell

if TYPE_CHECKING:
    from flash_dist.bench.baselines.ours import Attend

CPU = torch.device("cpu")
SMALL = Shape(2, 12, 12, 4, 2, 16, 16, CAUSAL, "fp32")
PACKED = Shape(1, 9, 9, 2, 2, 16, 16, CAUSAL, "fp32", documents=(2, 3, 4))


@pytest.fixture(autouse=True)
def _eager_in_our_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "make_ours", make_eager)


def plan(*shapes: Shape, peers: tuple[str, ...] = (), states: tuple[str, ...] = ("warm",)) -> Plan:
    return Plan(shapes, peers, PASSES, states, seconds=1e-4)


@pytest.mark.slow
def test_every_pass_of_every_baseline_is_timed() -> None:
    rows = list(measure(plan(SMALL, peers=("eager", "sdpa-flash")), CPU, HostClock()))
    assert [row.shape for row in rows] == [SMALL]
    for entry in rows[0].entries.values():
        assert entry.reason == ""
        assert tuple(entry.timings) == PASSES
        assert all(len(timing.loops) == ROUNDS for timing in entry.timings.values())
    assert rows[0].findings == ()
    assert set(rows[0].entries["eager"].errors) == {"out", "dq", "dk", "dv"}
    assert max(rows[0].entries[OURS].errors.values()) < 1e-5  # against float64


def test_a_bias_is_timed_beside_the_plain_kernel() -> None:
    """Gradients of the bias are part of the backward; `plain` reads no bias and is not compared."""
    shape = replace(SMALL, scores="bias")
    (row,) = measure(plan(shape, peers=("plain", "eager")), CPU, HostClock())
    for entry in row.entries.values():
        assert (entry.reason, tuple(entry.timings)) == ("", PASSES)
    assert row.findings == ()
    assert set(row.entries["eager"].errors) == {"out", "dq", "dk", "dv", "dbias"}
    assert row.entries["plain"].errors == {}


def test_torchs_mode_is_as_users_get_it_and_only_for_those_who_are_named_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[bool, set[bool]] = {}

    def make_spy(problem: Problem) -> Attend:
        eager = make_eager(problem)

        def attend(*inputs: torch.Tensor) -> torch.Tensor:
            settings: Any = torch.utils.deterministic  # a property of the module: mypy sees none
            filled = settings.fill_uninitialized_memory
            seen.setdefault(torch.are_deterministic_algorithms_enabled(), set()).add(filled)
            return eager(*inputs)

        return attend

    monkeypatch.setattr(table, "make_ours", make_spy)
    peers = ("sdpa-flash", "sdpa-flash-deterministic")
    (row,) = measure(plan(SMALL, peers=peers), CPU, HostClock())
    assert tuple(row.entries) == (OURS, OURS_DETERMINISTIC, *peers)
    assert all(tuple(entry.timings) == PASSES for entry in row.entries.values())
    assert set(row.entries[OURS_DETERMINISTIC].errors.values()) == {0.0}
    assert row.findings == ()
    assert seen == {False: {True}, True: {True}}
    assert not torch.are_deterministic_algorithms_enabled()


def test_each_state_of_l2_has_its_row() -> None:
    rows = list(measure(plan(SMALL, states=("warm", "cold")), CPU, HostClock()))
    assert [row.state for row in rows] == ["warm", "cold"]
    assert all(tuple(row.entries[OURS].timings) == PASSES for row in rows)


def test_a_stack_runs_with_checkpoints_only() -> None:
    stack = replace(SMALL, layers=3)
    (row,) = measure(plan(stack, peers=("eager",)), CPU, HostClock())
    assert [tuple(entry.timings) for entry in row.entries.values()] == [("checkpointed",)] * 2


def test_a_cache_has_a_forward_and_out_alone() -> None:
    cached = replace(SMALL, cached=True, seqlen_q=1, mask=FULL, dtype="bf16")
    (row,) = measure(plan(cached, peers=("eager",)), CPU, HostClock())
    assert tuple(row.entries[OURS].timings) == ("forward",)
    assert set(row.entries["eager"].errors) == {"out"}
    assert cached.group == "d16 cache"


def test_a_stack_without_its_pass_has_no_row() -> None:
    wanted = replace(plan(replace(SMALL, layers=2)), passes=("forward",))
    assert list(measure(wanted, CPU, HostClock())) == []


def test_a_peer_that_cannot_run_is_an_entry_with_its_reason() -> None:
    (row,) = measure(plan(SMALL, peers=("sdpa-cudnn", "eager")), CPU, HostClock())
    assert row.entries["sdpa-cudnn"].reason
    assert row.entries["sdpa-cudnn"].timings == {}
    assert row.entries["eager"].timings
    assert row.findings == ()


def test_our_own_failure_is_a_finding_and_peers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(problem: Problem) -> Attend:
        message = f"no kernel for {problem.shape.name}\nand more"
        raise ValueError(message)

    monkeypatch.setattr(table, "make_ours", fail)
    (row,) = measure(plan(SMALL, peers=("eager",)), CPU, HostClock())
    said = f"ValueError: no kernel for {SMALL.name}"
    assert row.entries[OURS].reason == said
    assert row.findings == (f"ours failed on {SMALL.name}: {said}",)
    assert row.entries["eager"].timings


def test_a_lost_gpu_ends_the_run_after_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(_problem: Problem) -> Attend:
        message = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(message)

    monkeypatch.setattr(table, "make_eager", crash)
    rows = measure(plan(SMALL, SMALL, peers=("eager", "sdpa-flash")), CPU, HostClock())
    row = next(rows)
    assert "illegal memory access" in row.entries["eager"].reason
    assert "after eager failed on fp32 d16" in row.entries["sdpa-flash"].reason
    with pytest.raises(ContextLostError, match=r"after eager failed on fp32 d16 causal 2x12"):
        next(rows)


def test_a_wrong_mask_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_key_too_many(problem: Problem) -> Attend:
        visible = problem.visible
        assert visible is not None
        visible[0, 1] = True
        return make_eager(problem)

    monkeypatch.setattr(table, "make_eager", one_key_too_many)
    shape = replace(SMALL, batch=1)
    monkeypatch.setattr(checks, "measure_against_float64", lambda *_: {})
    (row,) = measure(plan(shape, peers=("eager",)), CPU, HostClock())
    assert any("eager and ours differ" in finding and "out" in finding for finding in row.findings)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> ToldHostClock:
    clock = ToldHostClock()
    tell(monkeypatch, clock, SHORT_MS)
    return clock


def test_a_short_pass_is_replayed_and_has_a_row_of_its_own_as_it_is_launched(
    told: ToldHostClock,
) -> None:
    short = replace(plan(SMALL, peers=("eager",)), passes=("forward", "backward"))
    graphs, eager = measure(short, CPU, told)
    assert (graphs.eager, eager.eager) == (False, True)
    for row, graph in ((graphs, True), (eager, False)):
        timings = [row.entries[name].timings["forward"] for name in (OURS, "eager")]
        assert [timing.graph for timing in timings] == [graph] * 2
        assert all(len(timing.loops) == ROUNDS for timing in timings)
        assert [timing.median_ms for timing in timings] == pytest.approx([SHORT_MS] * 2)
    assert graphs.findings == ()


def test_what_takes_long_is_not_replayed(told: ToldHostClock) -> None:
    told.milliseconds = LONG_MS
    (row,) = measure(replace(plan(SMALL), passes=("forward",)), CPU, told)
    timing = row.entries[OURS].timings["forward"]
    assert (row.eager, timing.graph) == (False, False)
    assert timing.median_ms == pytest.approx(LONG_MS)


def test_who_cannot_be_captured_stays_in_and_is_said_to_be(
    monkeypatch: pytest.MonkeyPatch, told: ToldHostClock
) -> None:
    made: list[object] = []

    def capture(make: Any, repeats: int) -> Any:  # noqa: ANN401 - runs
        made.append(make)
        if len(made) == 2:
            message = "operation not permitted when stream is capturing"
            raise RuntimeError(message)
        return ToldHostClock.capture(told, make, repeats)

    monkeypatch.setattr(told, "capture", capture)
    wanted = replace(plan(SMALL, peers=("eager",)), passes=("forward",))
    graphs, eager = measure(wanted, CPU, told)
    said = "RuntimeError: operation not permitted when stream is capturing"
    assert graphs.entries["eager"].uncaptured == {"forward": said}
    assert graphs.entries["eager"].timings == {}
    assert graphs.entries[OURS].timings["forward"].graph
    assert eager.entries["eager"].timings["forward"].median_ms == pytest.approx(SHORT_MS)
    assert (graphs.entries["eager"].reason, graphs.findings) == ("", ())


def test_a_clock_without_graphs_has_one_row() -> None:
    (row,) = measure(replace(plan(SMALL), passes=("forward",)), CPU, HostClock())
    assert row.launched("forward") == ""


def test_a_copy_is_timed_forward_and_backward_and_is_no_attention() -> None:
    (row,) = measure(plan(SMALL, peers=("copy",)), CPU, HostClock())
    assert tuple(row.entries["copy"].timings) == ("forward", "backward")
    assert (row.entries["copy"].errors, row.entries["copy"].reason) == ({}, "")


def test_what_is_under_way_is_told() -> None:
    said: list[str] = []
    wanted = replace(plan(SMALL), passes=("forward",))
    list(measure(wanted, CPU, HostClock(), said.append))
    assert said[0].startswith(f"{SMALL.name}: ")
    assert "ours" in said[0]
    assert said[1:] == [f"{SMALL.name}: forward, ours, round {number} of 3" for number in (1, 2, 3)]


def test_a_peer_for_masks_is_left_out_elsewhere() -> None:
    wanted = replace(plan(peers=("flex", "eager")), for_masks=("flex",))
    assert wanted.peers_of(SMALL) == ("eager",)
    assert wanted.peers_of(replace(SMALL, mask=Mask.parse("window:3,0"))) == ("flex", "eager")
    assert wanted.peers_of(PACKED) == ("flex", "eager")


MASKS = ["causal", "window:3,1", "window:2,0", "prefix:5", "block-causal:3", "random:40"]


@pytest.mark.parametrize("lengths", [(12, 12), (12, 20)], ids=str)
@pytest.mark.parametrize("text", MASKS)
def test_all_baselines_write_the_same_mask(text: str, lengths: tuple[int, int]) -> None:
    shape = Shape(1, *lengths, 2, 2, 16, 16, Mask.parse(text), "fp32")
    problem = Problem.draw(shape, CPU)
    mask_mod = make_mask_mod(problem)
    assert mask_mod is not None
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])[None]
    zero = torch.zeros((), dtype=torch.int64)
    assert problem.visible is not None
    assert torch.equal(mask_mod(zero, zero, i, j), problem.visible)


@pytest.mark.parametrize("text", ["block-causal:3", "prefix:5", "random:40"])
def test_our_own_mask_is_that_of_the_shape(text: str) -> None:
    problem = Problem.draw(Shape(1, 12, 20, 2, 2, 16, 16, Mask.parse(text)), CPU)
    visible = mask_arguments(problem)["mask"].visible(1, 2, 12, 20)
    assert problem.visible is not None
    assert torch.equal(visible.expand(1, 1, 12, 20)[0, 0], problem.visible)


def test_masks_that_users_name_stay_arguments() -> None:
    shapes = [replace(SMALL, mask=Mask.parse(x)) for x in ("full", "causal", "window:3,0")]
    found = [mask_arguments(Problem.draw(shape, CPU)) for shape in shapes]
    assert found == [{}, {"causal": True}, {"window_size": (3, 0)}]


def test_each_query_of_a_random_mask_sees_as_many_keys_on_every_device() -> None:
    problem = Problem.draw(replace(SMALL, seqlen_k=20, mask=Mask("random", (40,))), CPU)
    assert problem.random_mask.sum(dim=1).tolist() == [8] * 12
    assert len({tuple(row.tolist()) for row in problem.random_mask}) > 1
    again = Problem.draw(problem.shape, CPU, seed=7)
    assert torch.equal(problem.random_mask, again.random_mask)


def test_a_full_mask_is_no_mask() -> None:
    problem = Problem.draw(replace(SMALL, mask=FULL), CPU)
    assert problem.visible is None
    assert make_mask_mod(problem) is None


def test_documents_are_packed_and_know_where_they_begin() -> None:
    problem = Problem.draw(PACKED, CPU)
    assert problem.q.shape == (9, 2, 16)
    assert problem.cu_seqlens.tolist() == [0, 2, 5, 9]
    assert problem.document_ids.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2]
    with pytest.raises(CannotRun):
        make_eager(problem)


def test_float64_agrees_with_autograd_on_grouped_heads() -> None:
    problem = Problem.draw(replace(SMALL, seqlen_k=20, mask=Mask("window", (2, 1))), CPU)
    errors = measure_against_float64(compute(make_eager(problem), problem), problem)
    assert max(errors.values()) < 1e-5


def test_nan_is_an_error_without_end() -> None:
    good = tuple(torch.ones(1, 4, 2, 8) for _ in range(4))
    bad = tuple(x.clone() for x in good)
    for x in bad:
        x[0, 1, 0, 3] = torch.nan
    assert set(measure_errors(bad, good).values()) == {float("inf")}
    assert set(measure_errors(good, good).values()) == {0.0}


def test_a_refusal_of_torch_is_told_by_its_warning() -> None:
    said = [
        "Memory efficient kernel not used because:",
        "Memory Efficient attention has been runtime disabled.",
        "Flash attention kernel not used because:",
        "Flash Attention does not support non-null attn_mask.",
        "CuDNN attention kernel not used because:",
        "CuDNN attention has been runtime disabled.",
    ]
    assert _explain(said, "No available kernel.") == said[3]
    assert _explain([], "No available kernel.\nAborting.") == "No available kernel."


def test_failures_are_one_sentence() -> None:
    text = "CUDA out of memory. Tried to allocate 34.36 GiB. GPU 0 has"
    lacking = describe_failure(torch.OutOfMemoryError(text))
    assert re.fullmatch(r"out of memory \(.*34\.36 GiB\)", lacking)
    assert describe_failure(ValueError("\n one\ntwo")) == "ValueError: one"
    assert describe_failure(CannotRun("no")) == "no"


def test_torchs_advice_on_assertions_is_no_lost_gpu() -> None:
    advice = "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    failed = RuntimeError(f"CUDA error: operation failed during capture\n{advice}")
    assert not is_fatal(failed)
    assert is_fatal(RuntimeError(f"CUDA error: device-side assert triggered\n{advice}"))


def test_other_leaves_are_of_the_same_memory_and_gradients() -> None:
    problem = Problem.draw(SMALL, CPU)
    other = problem.with_own_leaves()
    for mine, its in zip(problem.inputs, other.inputs, strict=True):
        assert its is not mine
        assert (its.is_leaf, its.requires_grad) == (True, True)
        assert its.data_ptr() == mine.data_ptr()
    attend = make_eager(problem)
    for a, b in zip(compute(attend, problem), compute(attend, other), strict=True):
        assert torch.equal(a, b)


def test_kernel_names_lose_what_does_not_tell() -> None:
    assert shorten("void flash::flash_fwd_kernel<Traits<64>, true>(Params)") == "flash_fwd_kernel"
    assert shorten("void at::native::(anonymous namespace)::fill<int>(int)") == "fill"
    assert not _is_runtime("cunn_SoftMaxForward")
    assert _is_runtime("cudaLaunchKernelExC")
    assert shorten("triton_tem_fused_0") == "triton_tem_fused_0"
