"""Ring attention over packed documents: a rank receives only keys that its queries attend to.

Each rank sends all others the smallest `first_key` of every 128 queries. From these, each rank
computes on its CPU which keys it sends and receives. In step s, rank r receives keys directly from
rank r - s, and later sends their dk and dv back. Results are merged, and gradients summed, in the
order of steps, as in ring.py. So no bit depends on timing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.autograd.function import once_differentiable

from ..errors import FlashDistError
from ..kernels import operators
from .merge import add_attention
from .parts import require_one_loss
from .plan import Planner, find_intervals

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..kernels.problem import Problem
    from ..masks.intervals import IntervalMask
    from .exchange import Arriving, Messages, Ring
    from .plan import ByStep, Plan

Tensor = torch.Tensor
DENSE: Final = torch.contiguous_format
Pair = tuple[Tensor, Tensor]
Pairs = dict[int, Pair]  # k and v, or dk and dv, by step


@torch.compiler.disable  # type: ignore[untyped-decorator, unused-ignore]
def attend_documents(
    q: Tensor, k: Tensor, v: Tensor, call: tuple[Ring, Problem], first_key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return out and lse; arguments as in `ring_attention`. The host waits for all ranks once."""
    out, lse = DocumentAttention.apply(q, k, v, plan_call(*call, first_key))  # type: ignore[no-untyped-call]
    return out, lse


def plan_call(ring: Ring, problem: Problem, first_key: Tensor) -> Call:
    """Return a call with its plan and the mask of the first step; the host waits for all ranks.

    Raises:
        FlashDistError: A CUDA graph is being captured.
    """
    if first_key.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        message = "ring_attention with first_key cannot be captured by a CUDA graph"
        hint = "leave it out of the graph: the host waits for the first keys of all ranks"
        raise FlashDistError(message, hint=hint)
    planner = Planner.of(ring, first_key)
    everything = slice(0, first_key.shape[-1])
    own = find_intervals(ring, ring.rank, first_key, everything, everything)
    plan = planner.wait()  # not earlier: the host launches the kernels of the mask meanwhile
    return Call(ring, problem, plan, first_key, {0: own})


@dataclass
class Sums:
    """A tensor [batch, tokens, ...], and copies of some token ranges for sums in a wider dtype."""

    x: Tensor
    copies: list[tuple[slice, Tensor]]

    @classmethod
    def of(cls, x: Tensor, ranges: ByStep, dtype: torch.dtype) -> Sums:
        """Convert the ranges of all steps but 0 to `dtype`; they stay views if x has that dtype."""
        others = unite(tokens for step, tokens in ranges.items() if step > 0)
        return cls(x, [(tokens, x[:, tokens].to(dtype)) for tokens in others])

    def select(self, tokens: slice) -> Tensor:
        """Return a view of the copy for these tokens, which one of the ranges must contain."""
        begin, copy = next((r.start, c) for r, c in self.copies if tokens.stop <= r.stop)
        return copy[:, tokens.start - begin : tokens.stop - begin]

    def round(self) -> Tensor:
        """Write the sums into x, rounded to its dtype, and return x."""
        for tokens, copy in self.copies:
            if copy.dtype != self.x.dtype:
                self.x[:, tokens] = copy
        return self.x


def unite(ranges: Iterable[slice]) -> list[slice]:
    """Return the ranges in ascending order; ranges that overlap or touch are joined."""
    united: list[slice] = []
    for one in sorted(ranges, key=lambda r: r.start):
        if united and one.start <= united[-1].stop:
            united[-1] = slice(united[-1].start, max(united[-1].stop, one.stop))
        else:
            united.append(one)
    return united


@dataclass
class Coming:
    """Tensors that are being received, by step."""

    arriving: Arriving
    keys: Pairs  # k and v that queries of this rank attend to
    grads: Pairs  # dk and dv of keys that this rank sent to other ranks

    def wait(self) -> tuple[Pairs, Pairs]:
        """Return keys and gradients by step; on a GPU the current stream waits, not the host."""
        self.arriving.wait()
        return self.keys, self.grads


@dataclass(frozen=True)
class Exchange:
    """Exchanges keys and values, and their gradients, between the ranks in one call."""

    ring: Ring
    plan: Plan
    held: Pair  # k and v of this rank

    def start(self, index: int, returned: Pairs | None = None) -> Coming:
        """Start to exchange the keys of group `index`, and the gradients of group `index` - 2.

        Args:
            index: Index in `plan.groups`; beyond the last group, no keys are exchanged.
            returned: dk and dv that this rank computed for group `index` - 2, by step; None in the
                forward.
        """
        plan, ring = self.plan, self.ring
        sent: Messages = []
        received: Messages = []
        keys: Pairs = {}
        grads: Pairs = {}
        for step in plan.groups[index] if index < len(plan.groups) else ():
            if step in plan.lent:
                lent = (x[:, plan.lent[step]].contiguous() for x in self.held)
                sent += [(ring.find_user(step), x) for x in lent]
            if step in plan.keys:
                keys[step] = self._allocate(plan.keys[step])
                received += [(ring.find_source(step), x) for x in keys[step]]
        for step, pair in (returned or {}).items():
            sent += [(ring.find_source(step), x) for x in pair]
        for step in () if returned is None else plan.groups[index - 2]:
            if step in plan.lent:
                grads[step] = self._allocate(plan.lent[step])
                received += [(ring.find_user(step), x) for x in grads[step]]
        return Coming(ring.exchange(sent, received), keys, grads)

    def _allocate(self, tokens: slice) -> Pair:
        """Return uninitialized tensors like k and v, with the length of a token range."""
        k, v = (torch.empty_like(x[:, tokens], memory_format=DENSE) for x in self.held)
        return k, v


@dataclass(frozen=True)
class Call:
    """A call's arguments other than q, k and v, with its plan and the masks of its steps so far."""

    ring: Ring
    problem: Problem
    plan: Plan
    first_key: Tensor
    masks: dict[int, IntervalMask]

    def attend(self, step: int, q: Tensor, held: Pairs) -> Any:  # noqa: ANN401
        """Return out and lse of a step; None if it has no keys. Remove its keys from `held`."""
        if step not in held:
            return None
        rows, ring = self.plan.rows[step], self.ring
        if step not in self.masks:
            source, keys = ring.find_source(step), self.plan.keys[step]
            self.masks[step] = find_intervals(ring, source, self.first_key, rows, keys)
        problem = self.problem._replace(mask=self.masks[step])
        return operators.attend(q[:, rows], *held.pop(step), problem)

    def differentiate(
        self,
        step: int,
        saved: tuple[Tensor, Tensor, Tensor],
        upstream: tuple[Tensor, Tensor | None],
        held: Pairs,
    ) -> Any:  # noqa: ANN401
        """Return dq, dk and dv of a step; None if it has no keys. Remove its keys from `held`.

        Args:
            step: The step.
            saved: q, out and lse.
            upstream: dout and dlse.
            held: Keys and values by step.
        """
        if step not in held:
            return None
        rows = self.plan.rows[step]
        (q, out, lse), (dout, dlse) = saved, upstream
        # Not `operators.differentiate`: for one key it assumes that no other keys exist.
        results = out[:, rows].contiguous(), lse[..., rows].contiguous()
        dq, dk, dv, _ = operators.backward(
            dout[:, rows],
            (q[:, rows], *held.pop(step), *results),
            None if dlse is None else dlse[..., rows],
            self.problem._replace(mask=self.masks[step]),
        )
        return dq, dk, dv


class DocumentAttention(torch.autograd.Function):
    """Attention of this rank's queries to the keys that the ranks exchange by a plan."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:  # noqa: ANN401
        """Return out and lse."""
        plan = call.plan
        held: Pairs = {0: (k, v)}
        exchange = Exchange(call.ring, plan, (k, v))
        coming = exchange.start(1)
        for index, steps in enumerate(plan.groups):
            for step in steps:
                one = call.attend(step, q, held)
                if step == steps[-1]:
                    held, _ = coming.wait()
                    coming = exchange.start(index + 2)  # before merging: see `Ring.pass_on`
                if step == 0:
                    out, lse = one
                    sums = Sums.of(out, plan.rows, lse.dtype)
                elif one is not None:
                    rows = plan.rows[step]
                    add_attention(sums.select(rows), lse[..., rows], *one)
                del one
        out = sums.round()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of q, k and v."""
        require_one_loss(dout, dlse)
        q, k, v, out, lse = ctx.saved_tensors
        upstream = torch.zeros_like(out) if dout is None else dout, dlse
        call: Call = ctx.call
        plan = call.plan
        held: Pairs = {0: (k, v)}
        exchange = Exchange(call.ring, plan, (k, v))
        coming = exchange.start(1)
        for index, steps in enumerate(plan.groups):
            pairs: Pairs = {}
            for step in steps:
                one = call.differentiate(step, (q, out, lse), upstream, held)
                if step > 0 and one is not None:
                    pairs[step] = one[1:]
                if step == steps[-1]:
                    held, lent = coming.wait()
                    coming = exchange.start(index + 2, pairs)  # starts before the sums
                    del pairs
                if step == 0:
                    dq = Sums.of(one[0], plan.rows, lse.dtype)
                    sums = [Sums.of(x, plan.lent, lse.dtype) for x in one[1:]]
                elif one is not None:
                    dq.select(plan.rows[step]).add_(one[0])
                del one
            _add(sums, lent, plan.lent)
        _add(sums, coming.wait()[1], plan.lent)  # gradients of the last group
        return dq.round(), *(x.round() for x in sums), None


def _add(sums: list[Sums], gradients: Pairs, lent: ByStep) -> None:
    """Add the dk and dv that other ranks computed for this rank's keys, in the order of steps."""
    for step, pair in gradients.items():
        for total, x in zip(sums, pair, strict=True):
            total.select(lent[step]).add_(x)
