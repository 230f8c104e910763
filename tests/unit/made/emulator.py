"""Kernels compiled for this machine's CPU: tests/emulator."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from ci.places import INCLUDES, SOURCES, read_table
from flash_dist.toolkit.make.kernels.generate import generate
from flash_dist.toolkit.make.project import NATIVE
from flash_dist.toolkit.targets.archs import ArchSet

from .planner import require_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from flash_dist.masks.plan import MaskPlan
    from flash_dist.toolkit.make.kernels.table import Family

Tensor = torch.Tensor

EMULATOR: Final = Path(__file__).parents[2] / "emulator"
SIZES: Final[dict[str, set[int]]] = {  # head_dims per role, family or configuration
    "BiasGradientAnySm90Config": {64, 128},
    "BiasGradientSm90Config": {64, 128},
    "DeltaConfig": {64, 128, 384, 512},
    "DkdvConfig": {64, 128},
    "FusedBiasSm90Config": {64, 128},
    "FusedBiasTileSm90Config": {64, 128},
    "FusedFp32BiasTileSm90Config": {64, 128},
    "ReduceConfig": {64, 128, 384, 512},
    "bwd_dkdv_sm90": {384, 512},
    "bwd_dq_gemm_sm90": {384, 512},
    "decode": {64, 128, 384, 512},
    "decode_wide": {64, 128},
    "decode_fold": {256, 512},
    "fwd_kvcache": {64, 128},
    "fwd_sm90": {64, 128, 384, 512},
    "fwd_bias": {64, 128},
    "fwd_max_logit": {64, 128},
    "mla": {576},
    "mla_pair": {576},
    "mla_weights": {576},
    "mla_values": {576},
    "mla_fold": {576},
}
ROOM: Final = {99: 101376, 163: 166912, 227: 232448}  # bytes of shared memory per plan
UNBOUNDED: Final = 1 << 30  # as in core/params.h
ENOUGH: Final = 1 << 30  # bytes of workspace

_FOLDER: Final = tempfile.TemporaryDirectory(prefix="flash_dist-")  # removed with the process


class _Call(ctypes.Structure):
    """`EmulatedCall` of tests/emulator/decode.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in [
                "batch",
                "seqlen_q",
                "num_heads_q",
                "num_heads_kv",
                "head_dim",
                "head_dim_v",
                "entries",
                "page",
                "pages",
                "left",
                "right",
                "budget",
                "capability",
                "sm_count",
                "smem_limit",
                "seed",
            ]
        ),
        *((name, ctypes.c_double) for name in ["softmax_scale", "softcap"]),
        *(
            (name, ctypes.c_void_p)
            for name in ["q", "k", "v", "out", "lse", "seqlens", "table", "alibi", "sinks"]
        ),
    )


@dataclass(frozen=True)
class Gpu:
    """Properties of a GPU that decide how work is distributed, but not the bits."""

    sm_count: int = 3
    plan: int = 163
    capability: int = 80
    budget: int = ENOUGH
    seed: int = 0  # seed for the order of warps


def _sizes(family: Family) -> set[int]:
    """Return the head_dims at which a family is compiled."""
    names = family.config, family.name, family.role
    return next((SIZES[name] for name in names if name in SIZES), set())


@cache
def _library() -> ctypes.CDLL:
    require_compiler()
    folder = Path(_FOLDER.name)
    archs = ArchSet.parse("8.0;9.0a").archs
    table = read_table()
    families = (
        replace(
            family,
            words=(("bf16",),),
            rows=tuple(row for row in family.rows if row.sizes[0] in _sizes(family)),
        )
        for family in table.families
    )
    generate(replace(table, families=tuple(families)), archs, (), folder)
    sources = [*(folder / "targets").rglob("*.cu"), *EMULATOR.glob("*.cpp")]
    names = ("decode.cpp", "launch.cpp", "plan.cpp", "recording.cpp")
    sources += [SOURCES / "host" / name for name in names]
    sources.append(NATIVE / "recording.cpp")
    library = folder / "emulated.so"
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-x", "c++"]
    flags.append("-Wno-psabi")  # warns about passing maps by value
    include = [f"-I{path}" for path in (EMULATOR, *INCLUDES, folder)]
    command = [os.environ.get("CXX", "g++"), *flags, *include, *map(str, sources), "-o"]
    subprocess.run([*command, str(library)], check=True)
    loaded = ctypes.CDLL(str(library))
    for name in ("decode", "forward", "backward", "bias_gradient"):
        loaded[f"emulate_{name}"].restype = ctypes.c_int64
    loaded.emulated_error.restype = ctypes.c_char_p
    return loaded


def emulate(  # noqa: PLR0913 - a call, and where it runs
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    lengths: Tensor | None,
    table: Tensor | None = None,
    *,
    head_dim_v: int,
    causal: bool = False,
    left: int | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    sinks: Tensor | None = None,
    gpu: Gpu = Gpu(),
) -> tuple[Tensor, Tensor, int]:
    """Return out, lse and the number of bank conflicts of rows of 16 bytes.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], bfloat16 like all tensors, contiguous.
        k: [entries, page, num_heads_kv, head_dim].
        v: Likewise, head_dim_v; None: the first columns of k.
        lengths: [batch], int32.
        table: [batch, pages], int32.
        head_dim_v: Columns of v and out.
        causal: Aligned to the bottom right.
        left: Keys before the diagonal that a query sees; None: all.
        softcap: Softcap of the scores; 0: none.
        alibi, sinks: [num_heads_q], float32.
        gpu: The emulated GPU.

    Raises:
        RuntimeError: An error of the emulator or the host code.
    """
    batch, seqlen_q, heads, head_dim = q.shape
    out = q.new_full((batch, seqlen_q, heads, head_dim_v), torch.nan)
    lse = torch.full((batch, heads, seqlen_q), torch.nan)
    band = (UNBOUNDED if left is None else left, 0 if causal else UNBOUNDED)
    numbers = (
        *(batch, seqlen_q, heads, k.shape[2], head_dim, head_dim_v, k.shape[0], k.shape[1]),
        *(0 if table is None else table.shape[1], *band),
        *(gpu.budget, gpu.capability, gpu.sm_count, ROOM[gpu.plan], gpu.seed),
        *(head_dim**-0.5, softcap),
    )
    tensors = (q, k, k if v is None else v, out, lse, lengths, table, alibi, sinks)
    addresses = (None if x is None else x.data_ptr() for x in tensors)
    library = _library()
    conflicts = int(library.emulate_decode(ctypes.byref(_Call(*numbers, *addresses))))
    if conflicts < 0:
        raise RuntimeError(library.emulated_error().decode())
    return out, lse, conflicts


def _describe(bias: Tensor | None) -> tuple[Any, ...]:
    """Return the address and strides of a bias, and the other facts that the binding finds."""
    strides = (ctypes.c_int64 * 4)()
    if bias is None:
        return (None, strides, 0, 0, 0)
    sizes = tuple(zip(bias.shape, bias.stride(), strict=True))
    strides[:] = [0 if n == 1 else stride for n, stride in sizes]
    size = bias.element_size()
    even = all(n % 2 == 0 for n in (*strides[:3], bias.shape[3], bias.data_ptr() // size))
    in_pairs = even and strides[3] == 1
    rest = bias.untyped_storage().nbytes() - bias.storage_offset() * size
    return (bias.data_ptr(), strides, bias.dtype == torch.float32, in_pairs, rest)


class _Numbers(ctypes.Structure):
    """`EmulatedNumbers` of tests/emulator/decode.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_int64)
            for name in [
                *("batch", "seqlen_q", "seqlen_k", "total_q", "total_k"),
                *("num_heads_q", "num_heads_kv", "head_dim", "head_dim_v"),
                *("left", "right", "capability", "sm_count", "smem_limit", "seed", "budget"),
                *("mask_kind", "mask_batches", "mask_heads"),
            ]
        ),
        ("softmax_scale", ctypes.c_double),
    )


class _Bias(ctypes.Structure):
    """`EmulatedBias` of tests/emulator/decode.cpp."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("strides", ctypes.c_int64 * 4),
        *((name, ctypes.c_int64) for name in ["is_fp32", "in_pairs", "bytes"]),
    )


@dataclass(frozen=True)
class _Problem:
    """The arguments that `emulate_forward` and `emulate_backward` share."""

    window: tuple[int, int]
    mask: MaskPlan | None
    documents: tuple[Tensor, Tensor] | None
    longest: tuple[int, int]
    bias: Tensor | None
    gpu: Gpu

    def run(  # noqa: PLR0913, PLR0917 - the parts of an argument
        self,
        function: Callable[[object], int],
        argument: type[_Numbers],
        qkv: tuple[Tensor, Tensor, Tensor],
        others: Sequence[Tensor | None],
        arrays: Sequence[str],
        more: Sequence[object] = (),
    ) -> None:
        """Call a function of the library.

        Args:
            function: The function.
            argument: The type of its argument.
            qkv: q, k and v.
            others: The tensors that follow them in the argument.
            arrays: Names of the arrays of a mask, which come next.
            more: What follows the bias.

        Raises:
            RuntimeError: An error of the emulator or the host code.
        """
        q, k, v = qkv
        batch, seqlen_q, heads, head_dim = q.shape
        seqlen_k = k.shape[1]
        totals = seqlen_q, seqlen_k
        if self.documents is not None:
            batch, seqlen_q, seqlen_k = len(self.documents[0]) - 1, *self.longest
        mask, gpu = self.mask, self.gpu
        numbers = (
            *(batch, seqlen_q, seqlen_k, *totals, heads, k.shape[2], head_dim, v.shape[3]),
            *(*self.window, gpu.capability, gpu.sm_count, ROOM[gpu.plan], gpu.seed, gpu.budget),
            *((0, 1, 1) if mask is None else (mask.kind, mask.batches, mask.heads)),
            head_dim**-0.5,
        )
        known = {} if mask is None else mask.arrays
        every = (*qkv, *others, *map(known.get, arrays))
        addresses = (None if x is None else x.data_ptr() for x in every)
        call = argument(*numbers, *addresses, _Bias(*_describe(self.bias)), *more)
        if function(ctypes.byref(call)) < 0:
            raise RuntimeError(_library().emulated_error().decode())


class _Forward(_Numbers):
    """`EmulatedForward` of tests/emulator/decode.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in [
                *("q", "k", "v", "out", "lse", "cu_q", "cu_k", "sinks", "max_logit"),
                *("key_bounds", "rows", "query_ranges", "begin", "entries", "bits"),
            ]
        ),
        ("bias", _Bias),
    )


def emulate_forward(  # noqa: PLR0913 - a call, and where it runs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    mask: MaskPlan | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    max_logit: Tensor | None = None,
    gpu: Gpu = Gpu(capability=90, plan=227),
) -> tuple[Tensor, Tensor]:
    """Return out and lse.

    Args:
        q: [batch, seqlen_q, num_heads_q, head_dim], bfloat16; packed: [1, total_q, ...].
        k, v: [batch, seqlen_k, num_heads_kv, head_dim or head_dim_v]; packed: [1, total_k, ...].
        window: Keys to the left and to the right of the diagonal that a query sees.
        mask: A plan instead of a window.
        documents: cu_seqlens of q and k, int32.
        longest: The longest document of q and of k.
        sinks: [num_heads_q], float32.
        bias: [1 or batch, 1 or num_heads_q, 1 or seqlen_q, 1 or seqlen_k], bfloat16 or float32.
        max_logit: [num_heads_q], float32, -inf; receives each head's largest score.
        gpu: The emulated GPU.

    Raises:
        RuntimeError: An error of the emulator or the host code.
    """
    out = q.new_full((*q.shape[:3], v.shape[3]), torch.nan)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), torch.nan)
    others = (out, lse, *(documents or (None, None)), sinks, max_logit)
    arrays = (
        *("key_bounds", "rows", "query_ranges"),
        *("by_query_128_begin", "by_query_128_entries", "bits"),
    )
    problem = _Problem(window, mask, documents, longest, bias, gpu)
    problem.run(_library().emulate_forward, _Forward, (q, k, v), others, arrays)
    return out, lse


_LISTS: Final = tuple(
    f"by_{side}_{rows}_{part}"
    for side in ("query", "key")
    for rows in (64, 128)
    for part in ("begin", "entries", "slots")
)


class _Backward(_Numbers):
    """`EmulatedBackward` of tests/emulator/decode.cpp."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in [
                *("q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "cu_q", "cu_k"),
                *("key_bounds", "rows", "query_ranges", "key_ranges", "key_slots"),
                *(*_LISTS, "bits"),
            ]
        ),
        ("bias", _Bias),
    )


def emulate_backward(  # noqa: PLR0913 - a call, and where it runs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    mask: MaskPlan | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
    bias: Tensor | None = None,
    gpu: Gpu = Gpu(capability=90, plan=227),
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv; arguments as of `emulate_forward`, which returns out and lse.

    Raises:
        RuntimeError: An error of the emulator or the host code.
    """
    dq, dk, dv = (torch.full_like(x, torch.nan) for x in (q, k, v))
    others = (out, lse, dout, dq, dk, dv, *(documents or (None, None)))
    arrays = ("key_bounds", "rows", "query_ranges", "key_ranges", "key_slots", *_LISTS, "bits")
    problem = _Problem(window, mask, documents, longest, bias, gpu)
    problem.run(_library().emulate_backward, _Backward, (q, k, v), others, arrays)
    return dq, dk, dv


class _BiasGradient(_Backward):
    """`EmulatedBiasGradient` of tests/emulator/decode.cpp."""

    _fields_ = (
        ("sums", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ["bytes", "batches", "heads", "splits", "rounds"]),
    )


def emulate_bias_gradient(  # noqa: PLR0913 - a call, and where it runs
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    bias: Tensor,
    splits: int = 1,
    window: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    mask: MaskPlan | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    longest: tuple[int, int] = (0, 0),
    gpu: Gpu = Gpu(capability=90, plan=227),
) -> Tensor:
    """Return partial sums of the gradient of a bias, [splits, *bias.shape].

    Args:
        q, k, v, out, lse, dout, window, mask, documents, longest, gpu: As of `emulate_backward`.
        bias: [1 or batch, 1 or num_heads_q, seqlen_q, seqlen_k].
        splits: Blocks that share the batch entries and heads of a tile.

    Raises:
        RuntimeError: An error of the emulator or the host code.
    """
    rounds = splits == 1 and bias.dtype == torch.bfloat16
    dtype = torch.bfloat16 if rounds else torch.float32
    sums = torch.full((splits, *bias.shape), torch.nan, dtype=dtype)
    others = (out, lse, dout, None, None, None, *(documents or (None, None)))
    arrays = ("key_bounds", "rows", "query_ranges", "key_ranges", "key_slots", *_LISTS, "bits")
    problem = _Problem(window, mask, documents, longest, bias, gpu)
    more = sums.data_ptr(), sums.nbytes, *bias.shape[:2], splits, rounds
    function = _library().emulate_bias_gradient
    problem.run(function, _BiasGradient, (q, k, v), others, arrays, more)
    return sums
