"""Soft caps, ALiBi, sinks, biases and dropout, as arguments of each baseline."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

import tests.reference
from flash_dist.bench.baselines.eager import make_eager
from flash_dist.bench.baselines.failures import CannotRun
from flash_dist.bench.baselines.ours import make_ours
from flash_dist.bench.baselines.problem import Problem
from flash_dist.bench.baselines.scoring import (
    DROPOUT_P,
    SOFTCAP,
    alibi_slopes,
    score_arguments,
)
from flash_dist.bench.baselines.sdpa import make_sdpa
from flash_dist.bench.baselines.sets import feature_shapes, score_shapes
from flash_dist.bench.baselines.shapes import CAUSAL, FEATURES, SCORES, Mask, Shape
from flash_dist.bench.baselines.table import make_attend
from flash_dist.bench.measuring.agreement import NAMES, compute, measure_errors
from tests.scores import Scored
from tests.scores import compute as by_formula

if TYPE_CHECKING:
    from collections.abc import Callable

    from flash_dist.bench.baselines.ours import Attend

CPU = torch.device("cpu")
SMALL = Shape(2, 12, 20, 4, 2, 16, 16, CAUSAL, "fp32")
BENT = [x for x in SCORES if x]


def draw(scores: str, factor: float = 1.0) -> Problem:
    """Return a problem whose q is multiplied by `factor`."""
    problem = Problem.draw(replace(SMALL, scores=scores), CPU)
    with torch.no_grad():
        problem.q.mul_(factor)
    return problem


@pytest.mark.parametrize("scores", [*SCORES, "bias"])
def test_plain_torch_does_what_our_arguments_mean(scores: str) -> None:
    problem = draw(scores, factor=8.0)  # so that scores reach the cap
    q, k, v, *_ = (x.detach() for x in problem.inputs)
    arguments = score_arguments(problem)
    dlse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    visible = problem.visible
    wanted = by_formula(
        Scored(
            tests.reference.Problem(q, k, v, problem.dout, visible, dlse=dlse),
            arguments.get("softcap", 0.0),
            arguments.get("alibi_slopes"),
            arguments.get("learnable_sink"),
            bias=arguments.get("bias"),
        ),
        torch.float64,
    )
    found = compute(make_eager(problem), problem)
    errors = measure_errors(found, tuple(wanted[name] for name in NAMES if name in wanted))
    assert set(errors) == {"out", "dq", "dk", "dv"} | ({"dbias"} if scores == "bias" else set())
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("scores", BENT)
def test_scores_change_what_is_computed(scores: str) -> None:
    factor = 8.0 if scores == "softcap" else 1.0
    bent, plain = (draw(x, factor) for x in (scores, ""))
    errors = measure_errors(compute(make_eager(bent), bent), compute(make_eager(plain), plain))
    assert min(errors.values()) > 1e-3


@pytest.mark.parametrize("scores", [*BENT, "bias"])
@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn"])
def test_who_knows_no_scores_is_said_to_be_so(name: str, scores: str) -> None:
    with pytest.raises(CannotRun, match=f"got {scores}$"):
        make_attend(name, draw(scores))


@pytest.mark.parametrize("make", [make_ours, partial(make_sdpa, "sdpa-flash")])
@pytest.mark.parametrize("scores", ["alibi", "dropout"])
def test_packed_documents_have_plain_scores(make: Callable[..., Attend], scores: str) -> None:
    packed = Shape(1, 9, 9, 2, 2, 16, 16, CAUSAL, "fp32", documents=(2, 3, 4), scores=scores)
    with pytest.raises(CannotRun, match=f"got {scores}$"):
        make(Problem.draw(packed, CPU))


def test_sdpa_is_told_to_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, object]] = []

    def attend(q: torch.Tensor, *_: object, **options: object) -> torch.Tensor:
        told.append(options)
        return q

    name = "flash_dist.bench.baselines.sdpa.scaled_dot_product_attention"
    monkeypatch.setattr(name, attend)
    make_attend("sdpa-efficient", draw("dropout"))
    assert [options["dropout_p"] for options in told] == [DROPOUT_P]


@pytest.mark.parametrize("name", ["eager", "flex"])
def test_scores_do_not_say_what_is_dropped(name: str) -> None:
    with pytest.raises(CannotRun, match="dropout is no function of a score"):
        make_attend(name, draw("dropout"))


@pytest.mark.parametrize(
    ("scores", "argument"),
    [("softcap", "softcap"), ("alibi", "alibi_slopes"), ("sinks", "learnable_sink")],
)
def test_flash_attention_is_told_by_its_arguments_or_left_out(
    monkeypatch: pytest.MonkeyPatch, scores: str, argument: str
) -> None:
    told: list[object] = []

    def knows(q: torch.Tensor, _k: object, _v: object, **options: object) -> torch.Tensor:
        told.append(options[argument])
        return q

    def has_none(q: torch.Tensor, _k: object, _v: object, causal: object = None) -> torch.Tensor:
        assert causal
        return q

    knows.__signature__ = signature_with(argument)  # type: ignore[attr-defined]
    install(monkeypatch, knows)
    problem = draw(scores)
    make_attend("fa4", problem)(*problem.inputs)
    assert len(told) == 1
    install(monkeypatch, has_none)
    with pytest.raises(CannotRun, match=f"argument `{argument}`"):
        make_attend("fa4", problem)


def signature_with(argument: str) -> object:
    """Return a signature of q, k, v, causal and one argument more."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ("q", "k", "v", "causal", argument)
    return inspect.Signature([inspect.Parameter(name, kind) for name in names])


def install(monkeypatch: pytest.MonkeyPatch, func: Callable[..., torch.Tensor]) -> None:
    """Put a function in the place of flash-attention's."""
    name = "flash_dist.bench.baselines.packages._find_function"
    monkeypatch.setattr(name, lambda *_: func)


def test_slopes_fall_from_head_to_head() -> None:
    slopes = alibi_slopes(draw("alibi"))
    assert slopes.tolist() == [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8]


def test_a_set_has_every_kind_beside_the_plain_one() -> None:
    shapes = score_shapes()
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert {shape.scores for shape in shapes} == set(SCORES)
    for shape in shapes:
        assert replace(shape, scores="") in shapes
        assert Shape.from_json(shape.to_json()) == shape


def test_a_set_has_a_bias_and_dropout() -> None:
    shapes = feature_shapes()
    assert len({shape.name for shape in shapes}) == len(shapes)
    assert {shape.scores for shape in shapes} == set(FEATURES)
    assert shapes[0].name == "bf16 d64 full bias 8x2048 h32/32"


def test_a_shape_says_its_scores() -> None:
    shape = replace(SMALL, scores="softcap")
    assert shape.name == "fp32 d16 causal softcap 2x12/20 h4/2"
    assert shape.group == "d16 causal softcap"
    assert replace(shape, scores="").group == "d16 causal"
    assert score_arguments(draw("softcap")) == {"softcap": SOFTCAP}


def test_a_shape_that_was_recorded_before_has_plain_scores() -> None:
    data = replace(SMALL, mask=Mask("full")).to_json()
    del data["scores"]
    assert Shape.from_json(data) == replace(SMALL, mask=Mask("full"))
