"""Other packages, replaced by stubs that record their calls."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.bench.baselines.eager import attend_eagerly, make_eager
from flash_dist.bench.baselines.failures import CannotRun
from flash_dist.bench.baselines.packages import find_installed, make_package
from flash_dist.bench.baselines.problem import Problem
from flash_dist.bench.baselines.shapes import CAUSAL, FULL, Mask, Shape
from flash_dist.bench.baselines.table import make_attend
from flash_dist.bench.measuring.agreement import compute, measure_errors

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CPU = torch.device("cpu")
PACKED = Shape(1, 9, 9, 2, 2, 16, 16, CAUSAL, "fp32", documents=(2, 3, 4))

# The arguments of both packages that matter here, in order, with their defaults.
RECORDER = """
import torch
from flash_dist.bench.baselines.eager import attend_eagerly
calls = []

def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size={window}{more}):
    calls.append({{"causal": causal, "window_size": window_size{recorded}}})
    out = attend_eagerly((q, k, v), masked=None, group=q.shape[2] // k.shape[2])
    return {result}

def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k{longest}, causal=False{more}):
    calls.append({{"cu_seqlens_q": cu_seqlens_q.tolist(), "causal": causal{recorded_longest}}})
    return {result_packed}
"""


def write_recorder(folder: Path, name: str, **changes: str) -> None:
    """Write a package that records its calls."""
    fields = {
        "window": "(-1, -1)",
        "more": ", deterministic=False",
        "recorded": ', "deterministic": deterministic',
        "longest": ", max_seqlen_q=None, max_seqlen_k=None",
        "recorded_longest": ', "longest": (max_seqlen_q, max_seqlen_k)',
        "result": "out",
        "result_packed": "q",
        **changes,
    }
    path = {
        "fa4": folder / "flash_attn" / "cute" / "interface.py",
        "fa3": folder / "flash_attn_interface.py",
    }[name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDER.format(**fields), encoding="utf-8")


FA4 = {"window": "(None, None)", "result": "(out, None)", "result_packed": "(q, None)"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a folder of packages that Python searches first, and forget them afterwards."""
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith(("flash_attn", "cudnn"))]:
        del sys.modules[name]


def calls_of(name: str) -> list[dict[str, Any]]:
    module = {"fa4": "flash_attn.cute.interface", "fa3": "flash_attn_interface"}[name]
    found: list[dict[str, Any]] = sys.modules[module].__dict__["calls"]
    return found


def make_problem(mask: Mask = FULL, heads: tuple[int, int] = (4, 2)) -> Problem:
    return Problem.draw(Shape(1, 8, 8, *heads, 16, 16, mask, "fp32"), CPU)


def test_only_what_is_installed_is_found(folder: Path) -> None:
    assert find_installed() == ()
    write_recorder(folder, "fa4", **FA4)
    assert find_installed() == ("fa4",)
    (folder / "flash_attn_3").mkdir()
    (folder / "flash_attn_3" / "_C.abi3.so").touch()
    assert find_installed() == ("fa4", "fa3")
    write_cudnn(folder)
    assert find_installed() == ("fa4", "fa3", "cudnn-flex")
    assert not [name for name in sys.modules if name.startswith(("flash_attn", "cudnn"))]


def test_flash_attention_2_alone_is_no_fa4(folder: Path) -> None:
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text("raise ImportError('libcudart.so.12')")
    assert find_installed() == ()
    with pytest.raises(CannotRun, match=r"`flash_attn\.cute\.interface` .*: libcudart\.so\.12"):
        make_package("fa4", make_problem())


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("fa4", "flash_attn.cute.interface"),
        ("fa4-deterministic", "flash_attn.cute.interface"),
        ("fa3", "flash_attn_interface"),
        ("fa3-deterministic", "flash_attn_interface"),
        ("cudnn-flex", "cudnn.flex_attention"),
        ("cudnn-flex-deterministic", "cudnn.flex_attention"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_not_installed_is_refused_in_a_sentence(name: str, module: str) -> None:
    with pytest.raises(CannotRun) as caught:
        make_attend(name, make_problem())
    assert f"`{module}`" in str(caught.value)
    assert "not installed" in str(caught.value)


@pytest.mark.parametrize(("name", "changes"), [("fa4", FA4), ("fa3", {})], ids=["fa4", "fa3"])
def test_masks_and_determinism_become_arguments(
    folder: Path, name: str, changes: dict[str, str]
) -> None:
    write_recorder(folder, name, **changes)
    shown = (None, None) if name == "fa4" else (-1, -1)
    for baseline, mask, wanted in (
        (name, FULL, (False, shown, False)),
        (name, CAUSAL, (True, shown, False)),
        (f"{name}-deterministic", Mask("window", (3, 0)), (False, (3, 0), True)),
    ):
        problem = make_problem(mask)
        out = make_attend(baseline, problem)(*problem.inputs)
        assert isinstance(out, torch.Tensor)
        assert tuple(calls_of(name)[-1].values()) == wanted
        assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(("name", "changes"), [("fa4", FA4), ("fa3", {})], ids=["fa4", "fa3"])
def test_packed_documents_are_passed_on(folder: Path, name: str, changes: dict[str, str]) -> None:
    write_recorder(folder, name, **changes)
    problem = Problem.draw(PACKED, CPU)
    make_package(name, problem)(*problem.inputs)
    assert calls_of(name) == [{"cu_seqlens_q": [0, 2, 5, 9], "causal": True, "longest": (4, 4)}]


def test_a_version_that_finds_the_longest_by_itself_is_not_told(folder: Path) -> None:
    write_recorder(folder, "fa4", **FA4, longest="", recorded_longest="")
    problem = Problem.draw(PACKED, CPU)
    make_package("fa4", problem)(*problem.inputs)
    assert calls_of("fa4") == [{"cu_seqlens_q": [0, 2, 5, 9], "causal": True}]


def test_a_version_without_the_option_is_not_called_deterministic(folder: Path) -> None:
    write_recorder(folder, "fa4", **FA4, more="", recorded="")
    make_package("fa4", make_problem())
    with pytest.raises(CannotRun, match="argument `deterministic`"):
        make_package("fa4-deterministic", make_problem())


def test_a_mask_that_is_none_of_theirs_is_refused(folder: Path) -> None:
    write_recorder(folder, "fa3")
    with pytest.raises(CannotRun, match=r"full, causal, window.* random:50"):
        make_package("fa3", make_problem(Mask("random", (50,))))


# The arguments of cudnn-frontend that matter here. The mask is computed from the ends.
CUDNN = """
import torch
from flash_dist.bench.baselines.eager import Masked, attend_eagerly
calls = []

def create_mask_plan(mask_func, q, k, v, *, cu_seqlens_q=None, cu_seqlens_k=None,
                     max_seqlen_q=None, max_seqlen_k=None):
    if q.shape[-1] > 256:
        raise ValueError("supported head dimensions are 8 to 256; got 264")
    calls.append((mask_func, cu_seqlens_q, max_seqlen_q))
    return mask_func

def flex_attn_func(q, k, v, *, mask_plan, deterministic=False):
    print("Compiled FlexAttention kernel in 1.0s")
    calls.append(deterministic)
    if q.ndim == 3:
        return q + k + v
    keys = torch.arange(k.shape[1])
    hidden = ~torch.stack([visible(mask_plan[0, :, i], keys) for i in range(q.shape[1])])
    group = q.shape[2] // k.shape[2]
    return attend_eagerly((q, k, v), masked=Masked(hidden, False), group=group)

def visible(ends, keys):
    seen = keys < ends[0]
    for begin, end in ends[1:].reshape(-1, 2):
        seen = seen | (begin <= keys) & (keys < end)
    return seen
"""


def write_cudnn(folder: Path) -> None:
    path = folder / "cudnn" / "flex_attention" / "__init__.py"
    path.parent.mkdir(parents=True)
    path.write_text(CUDNN, encoding="utf-8")


def calls_of_cudnn() -> list[Any]:
    found: list[Any] = sys.modules["cudnn.flex_attention"].__dict__["calls"]
    return found


@pytest.mark.parametrize(
    ("mask", "ends"),
    [(FULL, 1), (CAUSAL, 1), (Mask("window", (3, 1)), 3), (Mask("block-causal", (4,)), 1)],
    ids=str,
)
def test_cudnn_gets_a_mask_by_the_ends_of_its_intervals(
    folder: Path, mask: Mask, ends: int
) -> None:
    write_cudnn(folder)
    problem = Problem.draw(Shape(2, 8, 12, 4, 2, 16, 16, mask, "fp32"), CPU)
    found = compute(make_attend("cudnn-flex-deterministic", problem), problem)
    errors = measure_errors(found, compute(make_eager(problem), problem))
    assert max(errors.values()) < 1e-5
    assert calls_of_cudnn()[0][0].shape == (1, ends, 2 * 8)
    assert calls_of_cudnn()[1:] == [True, True]


def test_cudnn_gets_packed_documents_with_keys_of_each_document(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_cudnn(folder)
    problem = Problem.draw(PACKED, CPU)
    make_package("cudnn-flex", problem)
    ends, begins, longest = calls_of_cudnn()[0]
    assert ends.tolist() == [[[1, 2, 1, 2, 3, 1, 2, 3, 4]]]
    assert (begins.tolist(), longest) == ([0, 2, 5, 9], 4)
    assert calls_of_cudnn()[1:] == [False]
    assert not capsys.readouterr().out


def test_cudnns_refusals_are_told(folder: Path) -> None:
    write_cudnn(folder)
    with pytest.raises(CannotRun, match=r"head dimensions are 8 to 256; got 264"):
        make_package("cudnn-flex", Problem.draw(Shape(1, 8, 8, 2, 2, 264, 264, FULL), CPU))
    with pytest.raises(CannotRun, match=r"random has no intervals"):
        make_package("cudnn-flex", make_problem(Mask("random", (50,))))


# Arguments after the tensors, in both schemas of flash-attention.
OPTIONS = {
    "cu_seqlens_q": "Tensor?",
    "cu_seqlens_k": "Tensor?",
    "max_seqlen_q": "int?",
    "max_seqlen_k": "int?",
    "softmax_scale": "float?",
    "is_causal": "bool",
    "window_size_left": "int",
    "window_size_right": "int",
}


def attend_with_lse(*inputs: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, _ = inputs
    group = q.shape[2] // k.shape[2]
    scores = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(group, dim=2))
    return attend_eagerly(inputs, masked=None, group=group), (scores * scale).logsumexp(-1)


@pytest.fixture
def operators(folder: Path) -> Iterator[list[dict[str, object]]]:
    """Make `torch.ops.flash_attn_3` of plain torch; yield the options of its backward calls."""
    del folder
    defaults = {"bool": "False", "int": "-1"}
    options = ", ".join(f"{kind} {name}={defaults.get(kind)}" for name, kind in OPTIONS.items())
    library = torch.library.Library("flash_attn_3", "DEF")
    library.define(
        f"fwd(Tensor q, Tensor k, Tensor v, {options}, int num_splits=0)"
        " -> (Tensor, Tensor, Tensor, Tensor)"
    )
    library.define(
        "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse,"
        f" Tensor(a!)? dq=None, Tensor(b!)? dk=None, Tensor(c!)? dv=None, {options},"
        " bool deterministic=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    seen: list[dict[str, object]] = []

    def forward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = dict(zip([*OPTIONS, "num_splits"], values[3:], strict=False))
        assert given["num_splits"] == 1
        out, lse = attend_with_lse(*values[:3], scale=float(given["softmax_scale"]))
        return out, lse, torch.empty(0), torch.empty(0)

    def backward(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dout, q, k, v, _out, _lse, *grads = values[:9]
        seen.append(dict(zip([*OPTIONS, "deterministic"], values[9:], strict=False)))
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, _ = attend_with_lse(*inputs, scale=q.shape[-1] ** -0.5)
            found = torch.autograd.grad(out, inputs, dout)
        for grad, one in zip(grads, found, strict=True):
            grad.copy_(one)
        return tuple(torch.empty(0) for _ in range(5))

    library.impl("fwd", forward, "CPU")
    library.impl("bwd", backward, "CPU")
    yield seen
    library._destroy()


@pytest.mark.parametrize("name", ["fa3", "fa3-deterministic"])
def test_the_operators_serve_where_the_module_is_absent(
    operators: list[dict[str, object]], name: str
) -> None:
    problem = make_problem()
    found = compute(make_package(name, problem), problem)
    errors = measure_errors(found, compute(make_eager(problem), problem))
    assert max(errors.values()) < 1e-5
    (options,) = operators
    assert options["softmax_scale"] == 16**-0.5
    assert options.get("deterministic", False) is name.endswith("deterministic")
