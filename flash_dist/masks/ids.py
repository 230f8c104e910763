"""Masks of queries and keys with numbers: blocks and documents.

They are intervals if no query sees keys with a gap between them, whatever the order of the ids.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch

from .bits import WORD, pack
from .inputs import Shape, Sizes
from .terms import Intervals, Part, Term

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class _IdsTerm(Term):
    """Queries and keys with numbers."""

    q_ids: Tensor  # [batch or 1, seqlen_q]
    k_ids: Tensor  # [batch or 1, seqlen_k]

    def __post_init__(self) -> None:
        batch = max(len(self.q_ids), len(self.k_ids))
        sizes = Sizes(batch, None, self.q_ids.shape[1], self.k_ids.shape[1])
        object.__setattr__(self, "sizes", sizes)

    def part(self, batch: slice, heads: slice) -> Term:  # noqa: ARG002 - of any
        """See Term."""
        q_ids, k_ids = (x[batch] if len(x) > 1 else x for x in (self.q_ids, self.k_ids))
        return replace(self, q_ids=q_ids, k_ids=k_ids)

    @abstractmethod
    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        """Return whether queries see keys."""

    def _sorted_ids(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return q_ids, and k_ids ascending with the keys they belong to, of equal batches."""
        values, order = self.k_ids.sort(dim=-1, stable=True)
        batch, _ = self.sizes.planes()
        q_ids, values, order = (
            x.expand(batch, -1).contiguous() for x in (self.q_ids, values, order)
        )
        return q_ids, values, order

    def words(self, part: Part, columns: slice, shape: Shape) -> Tensor:  # noqa: ARG002 - the ids' own
        """See Term."""
        batch, _, rows = part
        keys = slice(columns.start * WORD, columns.stop * WORD)
        q_ids = self.q_ids[batch if len(self.q_ids) > 1 else slice(0, 1), rows]
        k_ids = self.k_ids[batch if len(self.k_ids) > 1 else slice(0, 1), keys]
        return pack(self._sees(q_ids.unsqueeze(-1), k_ids.unsqueeze(1))).unsqueeze(1)

    def visible(self, shape: Shape) -> Tensor:  # noqa: ARG002 - the ids' own
        """See Term."""
        return self._sees(self.q_ids[:, None, :, None], self.k_ids[:, None, None, :])


@dataclass(frozen=True, eq=False)
class BlockCausalTerm(_IdsTerm):
    """A query sees the keys of its block and of those before: k_id <= q_id."""

    name = "block-causal"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids <= q_ids

    def intervals(self, shape: Shape) -> Intervals | None:  # noqa: ARG002 - the ids' own
        """See Term."""
        q_ids, values, order = self._sorted_ids()
        count = torch.searchsorted(values, q_ids, right=True)
        last = (count - 1).clamp(min=0)
        lo = order.cummin(-1).values.gather(-1, last)
        hi = order.cummax(-1).values.gather(-1, last) + 1
        return _contiguous(lo, hi, count)


@dataclass(frozen=True, eq=False)
class DocumentTerm(_IdsTerm):
    """A query sees the keys of its document: k_id == q_id."""

    name = "documents"

    def _sees(self, q_ids: Tensor, k_ids: Tensor) -> Tensor:
        return k_ids == q_ids

    def intervals(self, shape: Shape) -> Intervals | None:
        """See Term."""
        q_ids, values, order = self._sorted_ids()
        first = torch.searchsorted(values, q_ids)
        end = torch.searchsorted(values, q_ids, right=True)
        lo = order.gather(-1, first.clamp(max=shape.seqlen_k - 1))
        hi = order.gather(-1, (end - 1).clamp(min=0)) + 1
        return _contiguous(lo, hi, end - first)


def _contiguous(lo: Tensor, hi: Tensor, count: Tensor) -> Intervals | None:
    """Return intervals [batch, 1, seqlen_q] if none of them has a gap, or None.

    Args:
        lo: [batch, seqlen_q], the first key a query sees.
        hi: One more than the last one.
        count: How many it sees.
    """
    visible = count > 0
    if bool((visible & (hi - lo != count)).any()):
        return None
    return torch.where(visible, lo, 0).unsqueeze(1), torch.where(visible, hi, 0).unsqueeze(1)
