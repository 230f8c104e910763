"""The check that a build supports a GPU: results for calls on GPUs that are not here."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import pytest
import torch

from flash_dist.attention import support
from flash_dist.toolkit.errors import ExtensionError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Ask = Callable[[torch.dtype], None]


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """Clear the cached answers for these GPUs."""
    yield
    support.require_kernels.cache_clear()


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Ask:
    """Return a function that requires kernels of a build that has none for the test's GPU."""
    refused = [{"chosen": None, "refused": [{"symbol": "fwd", "reason": "too new"}]}]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: request.param)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(support, "select", lambda *_, **__: refused)
    monkeypatch.setattr(support, "unsupported_error", lambda *_, **__: None)
    return lambda dtype: support.require_kernels(0, dtype, 64, 64)


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


def choose(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], **chosen: Any) -> None:  # noqa: ANN401
    """Let every GPU have this capability, and let the dispatcher choose this variant."""
    monkeypatch.setattr(support, "_warned", set())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(support, "select", lambda *_, **__: [{"chosen": chosen, "refused": []}])


def test_the_variant_is_logged_once_per_problem_and_not_printed(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    symbol = "flash_dist_fwd_fp16_d64_sm90a"
    choose(monkeypatch, (9, 0), symbol=symbol, binary_version=90, ptx_version=90)
    with caplog.at_level(logging.DEBUG, logger="flash_dist"):
        for _ in range(3):
            support.require_kernels(0, torch.float16, 64, 64)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert record.getMessage() == (
        f"GPU 0: the variant is {symbol} (binaryVersion 90, ptxVersion 90)"
    )
    assert capsys.readouterr() == ("", "")


def test_a_fallback_is_a_warning_once_per_gpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    symbol = "flash_dist_fwd_fp16_d64_compute80"
    choose(monkeypatch, (9, 0), symbol=symbol, binary_version=90, ptx_version=80)
    for head_dim in (64, 128):
        for device in (0, 1):
            support.require_kernels(device, torch.float16, head_dim, head_dim)
    warnings = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert [one.getMessage().partition(" runs ")[0] for one in warnings] == [
        f"GPU {index}, GPU (compute capability 9.0)," for index in (0, 1)
    ]
    assert "code for compute_80 through the driver's compiler" in warnings[0].getMessage()


def test_a_load_that_failed_for_want_of_memory_is_torchs_error_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen: dict[str, Any] = {
        "symbol": "flash_dist_fwd_fp16_d64_sm90a",
        "binary_version": 90,
        "ptx_version": 90,
    }
    choose(monkeypatch, (9, 0))
    words = "CUDA out of memory. flash_dist could not load flash_dist_fwd_fp16_d64_sm90a: ..."

    def fail(*_: object, **__: object) -> None:
        raise ExtensionError(words)

    monkeypatch.setattr(support, "select", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        support.require_kernels(0, torch.float16, 64, 64)
    assert str(caught.value) == words
    choose(monkeypatch, (9, 0), **chosen)
    support.require_kernels(0, torch.float16, 64, 64)


def test_a_load_that_failed_otherwise_keeps_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, (9, 0))

    def fail(*_: object, **__: object) -> None:
        message = "flash_dist could not load flash_dist_fwd_fp16_d64_sm90a: device not ready"
        raise ExtensionError(message)

    monkeypatch.setattr(support, "select", fail)
    with pytest.raises(ExtensionError, match="device not ready"):
        support.require_kernels(0, torch.float16, 64, 64)
