"""cu_seqlens that leave rows outside of all documents, and invalid cu_seqlens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import torch

from tests.gpu.packed import Packed
from tests.reference import Problem, random_problem

Tensor = torch.Tensor
LEAST, MOST = -(2**31), 2**31 - 1
TOTALS: Final = (300, 260)  # queries, keys


@dataclass(frozen=True)
class Boundaries:
    """cu_seqlens and the longest lengths of one call."""

    ends_q: tuple[int, ...]
    ends_k: tuple[int, ...]
    longest_q: int = 300
    longest_k: int = 260

    def given(self, device: torch.device) -> dict[str, Any]:
        """Return the fields as arguments of a call."""
        return {
            "cu_seqlens_q": torch.tensor(self.ends_q, dtype=torch.int32, device=device),
            "cu_seqlens_k": torch.tensor(self.ends_k, dtype=torch.int32, device=device),
            "max_seqlen_q": self.longest_q,
            "max_seqlen_k": self.longest_k,
        }

    def rows(self) -> list[tuple[range, range]]:
        """Return the queries and keys of each document, clipped to the tensors."""
        queries = cut_off(self.ends_q, TOTALS[0], self.longest_q)
        keys = cut_off(self.ends_k, TOTALS[1], self.longest_k)
        return list(zip(queries, keys, strict=True))

    def problem(self, *, causal: bool = False, **shape: Any) -> Packed:  # noqa: ANN401
        """Return random inputs with a mask equivalent to the boundaries."""
        base: Problem = random_problem(seqlen_q=TOTALS[0], seqlen_k=TOTALS[1], **shape)
        visible = torch.zeros(*TOTALS, dtype=torch.bool, device=base.q.device)
        for queries, keys in self.rows():
            band = torch.ones(len(queries), len(keys), dtype=torch.bool, device=base.q.device)
            band = band.tril(len(keys) - len(queries)) if causal else band
            visible[queries.start : queries.stop, keys.start : keys.stop] = band
        options = {"causal": causal}
        problem = replace(base, visible=visible[None, None], options=options, name=f"{self}")
        return Packed(problem, (), ())

    def uncovered(self) -> tuple[Tensor, Tensor]:
        """Return the queries and keys that belong to no document."""
        found = [torch.ones(total, dtype=torch.bool) for total in TOTALS]
        for document in self.rows():
            for none, rows in zip(found, document, strict=True):
                none[rows.start : rows.stop] = False
        return found[0], found[1]


def cut_off(ends: tuple[int, ...], total: int, longest: int) -> list[range]:
    """Return the rows of each document, clipped to the axis and the longest length."""
    on_axis = [min(max(end, 0), total) for end in ends]
    return [
        range(begin, begin + min(max(end - begin, 0), longest)) for begin, end in pairwise(on_axis)
    ]


# Valid: some rows belong to no document.
SPARSE: Final = {
    "a tail": Boundaries((0, 70, 200), (0, 130, 190)),
    "a long tail": Boundaries((0, 3, 5), (0, 2, 9), 3, 7),
    "nothing covered": Boundaries((0, 0, 0), (0, 0, 0), 1, 1),
    "queries alone": Boundaries((0, 150, 300), (0, 0, 0)),
    "keys alone": Boundaries((0, 0, 0), (0, 150, 260)),
}
# Invalid, but the results are defined.
LIES: Final = {
    "a head": Boundaries((40, 70, 300), (100, 101, 260)),
    "nothing covered, at the end": Boundaries((5, 5, 5), (260, 260, 260), 1, 1),
    "queries alone, behind a head": Boundaries((10, 150, 300), (0, 0, 0)),
    "keys alone, behind a head": Boundaries((0, 0, 0), (10, 150, 260)),
    "past the totals": Boundaries((0, 70, 4000), (0, 130, 70000)),
    "all past the totals": Boundaries((400, 500, 600), (261, 300, MOST)),
    "before the tensors": Boundaries((-50, 70, 300), (LEAST, 0, 260)),
    "from least to most": Boundaries((LEAST, 100, MOST), (LEAST, 90, MOST)),
    "longer than max_seqlen": Boundaries((0, 150, 170, 300), (3, 100, 200, 260), 64, 33),
    "one row of many": Boundaries((0, 300), (0, 260), 1, 1),
    "near the largest int": Boundaries((MOST - 5, MOST, MOST), (0, MOST - 1, MOST)),
}
# Invalid: results are undefined, but no other memory may change.
CHAOS: Final = {
    "decreasing": Boundaries((0, 200, 100, 300), (0, 260, 10, 200)),
    "turned round": Boundaries((300, 200, 100, 0), (260, 100, 50, 0)),
    "most to least": Boundaries((MOST, LEAST, MOST, LEAST), (MOST, LEAST, 0, MOST)),
    "queries and keys apart": Boundaries((0, MOST, 3), (LEAST, 5, LEAST), 128, 64),
}
