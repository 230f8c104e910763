"""The provider in torch's registry: known by name, active on request only, and removable."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import attention

from flash_dist.errors import FlashDistError
from flash_dist.integrations import torch_sdpa
from flash_dist.integrations.torch_sdpa import (
    NAME,
    Status,
    activate,
    deactivate,
    describe,
    register,
)
from flash_dist.toolkit.targets.devices import Device

if TYPE_CHECKING:
    from collections.abc import Iterator


class Registration:
    """Stub of the provider's registration, without the extension."""

    alive = 0

    def __init__(self) -> None:
        type(self).alive += 1
        self._is_there = True

    def remove(self) -> None:
        type(self).alive -= self._is_there
        self._is_there = False


@pytest.fixture(autouse=True)
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    module = ModuleType("provider")
    module.__dict__["Registration"] = Registration
    monkeypatch.setitem(sys.modules, f"{torch_sdpa.__name__}.provider", module)
    monkeypatch.setattr(Registration, "alive", 0)
    yield
    deactivate()


def test_an_import_activates_nothing() -> None:
    program = (
        "import flash_dist, flash_dist.integrations.torch_sdpa, torch.nn.attention as attention\n"
        "assert attention.current_flash_attention_impl() is None\n"
        f"assert {NAME!r} not in attention.list_flash_attention_impls()"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_registering_makes_the_name_known_and_activates_nothing() -> None:
    assert register() == register() == NAME
    assert NAME in attention.list_flash_attention_impls()
    assert attention.current_flash_attention_impl() is None
    assert Registration.alive == 0


def test_torchs_own_function_activates_what_is_registered() -> None:
    register()
    attention.activate_flash_attention_impl(NAME)
    assert torch_sdpa.status()
    assert Registration.alive == 1


def test_it_is_active_once_however_often_it_is_asked_for() -> None:
    activate()
    activate()
    assert attention.current_flash_attention_impl() == NAME
    assert Registration.alive == 1


def test_what_is_deactivated_leaves_no_kernel_behind() -> None:
    activate()
    deactivate()
    assert attention.current_flash_attention_impl() is None
    assert Registration.alive == 0
    deactivate()
    activate()
    assert Registration.alive == 1


def test_torch_2_10_knows_no_way_back_but_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention._registry, "_FLASH_ATTENTION_ACTIVE", None)
    register()
    registration = torch_sdpa._register_kernels()
    assert isinstance(registration, Registration)
    monkeypatch.delattr(attention, "restore_flash_attention_impl")
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: NAME)
    deactivate()
    assert Registration.alive == 0
    assert attention._registry._FLASH_ATTENTION_ACTIVE is None
    monkeypatch.undo()


def test_another_provider_that_is_active_is_left_alone() -> None:
    class Other:
        removed = False

        def remove(self) -> None:
            self.removed = True

    other = Other()
    attention.register_flash_attention_impl("other", register_fn=lambda: other)
    attention.activate_flash_attention_impl("other")
    deactivate()
    assert str(torch_sdpa.status()) == "other is torch's flash backend"
    activate()
    assert other.removed
    assert torch_sdpa.status().active == NAME


def test_the_status_names_what_goes_first_on_which_gpu() -> None:
    status = Status(NAME, ("cudnn_attention", "flash_attention", "math"))
    wanted = (
        "flash_dist is torch's flash backend; torch's selector goes first to cudnn on GPU 0, "
        "math on GPU 2"
    )
    assert str(status) == wanted
    assert str(Status(None, ("flash_attention",))) == "torch's own kernels are its flash backend"
    assert not Status(None, ())


def test_doctor_is_told_who_is_active_and_that_cudnn_goes_first() -> None:
    own = "torch's flash backend in this process: its own kernels"
    assert describe([Device(8, 0), Device(12, 0)]) == own
    activate()
    wanted = (
        "torch's flash backend in this process: flash_dist; on compute capability 9.0 and 10.0 "
        "torch asks cuDNN first, unless deterministic"
    )
    assert describe([Device(10, 0), Device(9, 0), Device(9, 0), Device(7, 5)]) == wanted


def test_torch_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.nn.attention", ModuleType("attention"))
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    with pytest.raises(FlashDistError, match=r"at least 2\.10, got 2\.9\.1") as caught:
        activate()
    assert "pip install" in str(caught.value.hint)
    monkeypatch.undo()


def test_torch_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(FlashDistError, match="torch_sdpa` needs torch"):
        register()
    monkeypatch.undo()
