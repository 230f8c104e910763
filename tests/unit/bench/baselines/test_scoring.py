"""Soft caps, ALiBi and sinks, as each baseline is told them."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

import tests.reference
from flash_dist.bench.baselines.eager import make_eager
from flash_dist.bench.baselines.failures import CannotRun
from flash_dist.bench.baselines.ours import make_ours
from flash_dist.bench.baselines.problem import Problem
from flash_dist.bench.baselines.scoring import SOFTCAP, alibi_slopes, score_arguments
from flash_dist.bench.baselines.sets import score_shapes
from flash_dist.bench.baselines.shapes import CAUSAL, SCORES, Mask, Shape
from flash_dist.bench.baselines.table import make_attend
from flash_dist.bench.measuring.agreement import compute, measure_errors
from tests.scores import Scored
from tests.scores import compute as by_formula

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
SMALL = Shape(2, 12, 20, 4, 2, 16, 16, CAUSAL, "fp32")
BENT = [x for x in SCORES if x]


def draw(scores: str, factor: float = 1.0) -> Problem:
    """Return a problem whose q is multiplied by `factor`."""
    problem = Problem.draw(replace(SMALL, scores=scores), CPU)
    with torch.no_grad():
        problem.q.mul_(factor)
    return problem


@pytest.mark.parametrize("scores", SCORES)
def test_plain_torch_does_what_our_arguments_mean(scores: str) -> None:
    problem = draw(scores, factor=8.0)  # so that scores reach the cap
    q, k, v = (x.detach() for x in problem.inputs)
    arguments = score_arguments(problem)
    dlse = torch.zeros(q.shape[0], q.shape[2], q.shape[1])
    visible = problem.visible
    wanted = by_formula(
        Scored(
            tests.reference.Problem(q, k, v, problem.dout, visible, dlse=dlse),
            arguments.get("softcap", 0.0),
            arguments.get("alibi_slopes"),
            arguments.get("learnable_sink"),
        ),
        torch.float64,
    )
    found = compute(make_eager(problem), problem)
    errors = measure_errors(found, tuple(wanted[name] for name in ("out", "dq", "dk", "dv")))
    assert max(errors.values()) < 1e-4


@pytest.mark.parametrize("scores", BENT)
def test_scores_change_what_is_computed(scores: str) -> None:
    factor = 8.0 if scores == "softcap" else 1.0
    bent, plain = (draw(x, factor) for x in (scores, ""))
    errors = measure_errors(compute(make_eager(bent), bent), compute(make_eager(plain), plain))
    assert min(errors.values()) > 1e-3


@pytest.mark.parametrize("scores", BENT)
@pytest.mark.parametrize("name", ["sdpa-flash", "sdpa-cudnn"])
def test_who_knows_no_scores_is_said_to_be_so(name: str, scores: str) -> None:
    with pytest.raises(CannotRun, match=f"got {scores}$"):
        make_attend(name, draw(scores))


def test_packed_documents_have_plain_scores() -> None:
    packed = Shape(1, 9, 9, 2, 2, 16, 16, CAUSAL, "fp32", documents=(2, 3, 4), scores="alibi")
    with pytest.raises(CannotRun, match=r"got alibi$"):
        make_ours(Problem.draw(packed, CPU))


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
