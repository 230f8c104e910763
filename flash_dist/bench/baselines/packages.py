"""Attention functions of other packages, all with an option for a deterministic backward.

`fa4` is flash_attn.cute, `fa3` calls the kernels of flash_attn_3, `cudnn-flex` is the interval
attention of cudnn-frontend. The functions differ between releases of a package. If the installed
release lacks an argument for the mask, the scores or determinism, the baseline cannot run.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from .failures import CannotRun
from .names import CUDNN_FLEX, DETERMINISTIC, PACKAGES
from .scoring import require_plain_scores, score_arguments

if TYPE_CHECKING:
    from collections.abc import Callable

    from .ours import Attend
    from .problem import Problem, Tensor

_MODULES: Final = {
    "fa4": "flash_attn.cute.interface",
    "fa3": "flash_attn_interface",
    CUDNN_FLEX: "cudnn.flex_attention",
}
_OPERATORS: Final = "flash_attn_3._C"  # registers torch.ops.flash_attn_3.fwd and bwd
_MASKS: Final = ("full", "causal", "window")


def find_installed() -> tuple[str, ...]:
    """Return the names in PACKAGES whose modules are installed, without importing the modules."""
    return tuple(
        name
        for name in PACKAGES
        if _is_there(_MODULES[name]) or (name == "fa3" and _is_there(_OPERATORS))
    )


def make_package(name: str, problem: Problem) -> Attend:
    """Return a package's attention, with the deterministic backward if the name says so.

    Raises:
        CannotRun: The package cannot be imported, or does not support the mask or an option.
    """
    base = name.removesuffix(DETERMINISTIC)
    if base == CUDNN_FLEX:
        return _make_cudnn_flex(problem, deterministic=name.endswith(DETERMINISTIC))
    return _make_flash_attention(base, problem, deterministic=name.endswith(DETERMINISTIC))


def _make_flash_attention(base: str, problem: Problem, *, deterministic: bool) -> Attend:
    mask, packed = problem.shape.mask, bool(problem.shape.documents)
    if mask.kind not in _MASKS:
        message = f"mask must be one of {', '.join(_MASKS)}, got {mask}"
        raise CannotRun(message)
    func = _find_function(base, "flash_attn_varlen_func" if packed else "flash_attn_func")
    known = inspect.signature(func).parameters
    wanted = score_arguments(problem)
    if mask.kind == "causal":
        wanted["causal"] = True
    if mask.kind == "window":
        wanted["window_size"] = mask.numbers
    if deterministic:
        wanted["deterministic"] = True
    for argument in wanted:
        if argument not in known:
            message = f"the installed version has no argument `{argument}`"
            raise CannotRun(message)
    if packed:
        wanted |= {x: value for x, value in _describe_packing(problem).items() if x in known}

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = func(q, k, v, **wanted)
        out: Tensor = found[0] if isinstance(found, tuple) else found  # some return (out, lse)
        return out

    return attend


def _make_cudnn_flex(problem: Problem, *, deterministic: bool) -> Attend:
    """Return attention with a plan of visible intervals; compile its kernels before any timing.

    NOTE: cudnn-frontend prints a line for each kernel that it compiles.
    """
    require_plain_scores(problem)
    attend_by_plan = _find_function(CUDNN_FLEX, "flex_attn_func")
    create = _find_function(CUDNN_FLEX, "create_mask_plan")
    packing = _describe_packing(problem) if problem.shape.documents else {}
    try:
        plan = create(make_interval_ends(problem), *problem.inputs, **packing)
    except (NotImplementedError, TypeError, ValueError) as error:  # an unsupported problem
        raise CannotRun(str(error).splitlines()[0]) from error

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = attend_by_plan(q, k, v, mask_plan=plan, deterministic=deterministic)
        return out

    with redirect_stdout(io.StringIO()):
        torch.autograd.grad(attend(*problem.inputs), problem.inputs, problem.dout)
    return attend


def make_interval_ends(problem: Problem) -> Tensor:
    """Return the mask as cudnn-frontend takes it: an int32 tensor x, [1, 1 or 3, total_q].

    Query i attends to the keys [0, x[0, 0, i]) of its own sequence. If the second axis of x has
    three entries, it also attends to the keys [x[0, 1, i], x[0, 2, i]).

    Raises:
        CannotRun: The mask is random.
    """
    shape = problem.shape
    lengths = [(x, x) for x in shape.documents] or [(shape.seqlen_q, shape.seqlen_k)]
    try:
        pairs = [pair for one in lengths for pair in shape.mask.intervals(*one)]
    except ValueError as error:
        raise CannotRun(str(error)) from error
    low, high = torch.tensor(pairs, dtype=torch.int32, device=problem.device).T
    ends = torch.stack([torch.zeros_like(low), low, high]) if low.any() else high[None]
    return ends.repeat(1, shape.batch)[None].contiguous()


def _describe_packing(problem: Problem) -> dict[str, Any]:
    begins, longest = problem.cu_seqlens, max(problem.shape.documents)
    both = (("cu_seqlens", begins), ("max_seqlen", longest))
    return {f"{name}_{side}": value for name, value in both for side in "qk"}


def _is_there(module: str) -> bool:
    """Return whether the module's file exists; importing its package would take seconds."""
    package, *inside = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # the imported module has no __spec__
        return False
    if spec is None or not inside:
        return spec is not None
    folders = [Path(x).joinpath(*inside[:-1]) for x in spec.submodule_search_locations or ()]
    return any(True for folder in folders for _ in folder.glob(f"{inside[-1]}*"))


def _find_function(base: str, function: str) -> Callable[..., Any]:
    """Import a function of a package; for fa3, fall back to `attend_by_operators`."""
    try:
        module = importlib.import_module(_MODULES[base])
    except ImportError as error:
        if base == "fa3" and _load_operators():
            return attend_by_operators
        missing = isinstance(error, ModuleNotFoundError) and _MODULES[base].startswith(
            error.name or "?"
        )
        reason = "is not installed" if missing else f"does not load: {error}"
        message = f"`{_MODULES[base]}` {reason}"
        raise CannotRun(message) from error
    try:
        found: Callable[..., Any] = getattr(module, function)
    except AttributeError as error:
        message = f"the installed version has no function `{function}`"
        raise CannotRun(message) from error
    return found


def _load_operators() -> bool:
    with suppress(ImportError):  # another library may have registered the operators
        importlib.import_module(_OPERATORS)
    return hasattr(torch.ops.flash_attn_3, "fwd") and hasattr(torch.ops.flash_attn_3, "bwd")


def attend_by_operators(  # noqa: PLR0913 - the signature of the function it replaces
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> Tensor:
    """Call the operators of FA3 as its `flash_attn_func` and `flash_attn_varlen_func` do."""
    options = {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
        "softmax_scale": q.shape[-1] ** -0.5,
        "is_causal": causal,
        "window_size_left": window_size[0],
        "window_size_right": window_size[1],
    }
    more = {"deterministic": deterministic}
    out: Tensor = _ByOperators.apply(q, k, v, options, more)  # type: ignore[no-untyped-call]
    return out


class _ByOperators(torch.autograd.Function):
    """Calls FA3's operators for forward and backward; `more`: arguments of the backward only."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:  # noqa: ANN401 - torch's signature
        q, k, v, options, more = arguments
        out: Tensor
        out, lse, *_ = torch.ops.flash_attn_3.fwd(q, k, v, **options, num_splits=1)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.arguments = {**options, **more}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # noqa: ANN401 - torch's signature
        q, k, v, out, lse = ctx.saved_tensors
        found = tuple(torch.empty_like(x) for x in (q, k, v))
        torch.ops.flash_attn_3.bwd(grads[0], q, k, v, out, lse, *found, **ctx.arguments)
        return (*found, None, None)
