"""Whether a build serves a GPU: what a call is told, on GPUs that are not here."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from flash_dist import _support
from flash_dist.errors import ExtensionError

if TYPE_CHECKING:
    from collections.abc import Callable

    Ask = Callable[[torch.dtype], None]


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Ask:
    """Return a question to a build without kernels, on a GPU of the test's capability."""
    refused = [{"chosen": None, "refused": [{"symbol": "fwd", "reason": "too new"}]}]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(_support, "select", lambda *_, **__: refused)
    monkeypatch.setattr(_support, "unsupported_error", lambda *_, **__: None)
    return lambda dtype: _support.require_kernels(0, dtype, 64, 64)


@pytest.mark.parametrize("ask", [(7, 5)], indirect=True, ids=str)
def test_bfloat16_on_a_gpu_without_its_instruction_is_a_type_error(ask: Ask) -> None:
    text = r"q must be float16 or float32 on compute capability 7\.5, got bfloat16"
    with pytest.raises(TypeError, match=text):
        ask(torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("ask", [(7, 0), (9, 0)], indirect=True, ids=str)
def test_a_gpu_that_nothing_is_built_for_is_the_builds_fault(ask: Ask, dtype: torch.dtype) -> None:
    text = r"no variant of kernel fwd loads on GPU 0 \(GPU\): fwd: too new"
    with pytest.raises(ExtensionError, match=text):
        ask(dtype)
