"""Tokens that tiny models generate from fixed prompts."""

from __future__ import annotations

from typing import Any

import torch

from tests.integrations.transformers.models import DEVICE, VOCABULARY, Family

Tensor = torch.Tensor

BATCH, SEQLEN = 3, 12

GENERATOR = torch.Generator().manual_seed(1)
IDS = torch.randint(3, VOCABULARY, (BATCH, SEQLEN), generator=GENERATOR).to(DEVICE)
LEFT = torch.ones(BATCH, SEQLEN, dtype=torch.long, device=DEVICE)
LEFT[0, :4] = LEFT[2, :7] = 0


def generate(
    family: Family,
    name: str,
    padding: Tensor,
    dtype: torch.dtype = torch.float32,
    **options: Any,  # noqa: ANN401
) -> tuple[Tensor, Tensor]:
    out = family.make(name, dtype).generate(
        input_ids=IDS,
        attention_mask=padding,
        max_new_tokens=10,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        disable_compile=True,  # a GPU would compile for a static cache; test_compiled.py tests that
        **options,
    )
    return out.sequences, torch.stack(out.logits)
