"""The backend choice of torch's varlen_attn: torch's own code, after our rule.

The code is from torch 2.14, from torch 2.15 and from the installed torch. A GPU is described by its
compute capability and cuDNN's version; its tensors have no memory.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import attention
from torch.nn.attention import varlen

from flash_dist.errors import FlashDistError
from flash_dist.integrations import torch_sdpa
from flash_dist.integrations.torch_sdpa import Status, activate, deactivate, order
from flash_dist.integrations.torch_sdpa.order import CUDNN, FLASH, Order, choose, prefer
from flash_dist.toolkit.targets.devices import Device
from tests.unit.made.varlen import torch_2_14, torch_2_15

if TYPE_CHECKING:
    from collections.abc import Iterator

MODULES = {"2.14": torch_2_14, "2.15": torch_2_15}
if hasattr(varlen, "_select_backend"):
    MODULES["here"] = varlen
PLACE = "torch.nn.attention.varlen"


class Registration:
    """Stub of the provider's registration, without the extension."""

    def __init__(self) -> None:
        self._order = Order()

    def remove(self) -> None:
        self._order.remove()


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make torch see a GPU of compute capability 9.0 and cuDNN 9.24."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92400)
    provider = ModuleType("provider")
    provider.__dict__["Registration"] = Registration
    monkeypatch.setitem(sys.modules, f"{torch_sdpa.__name__}.provider", provider)
    yield
    deactivate()
    torch.use_deterministic_algorithms(mode=False)
    for module in MODULES.values():
        for cached in ("_should_use_cudnn", "_cudnn_version_and_major_capability"):
            if hasattr(module, cached):
                getattr(module, cached).cache_clear()


@pytest.fixture(params=MODULES.values(), ids=list(MODULES))
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module of a torch version that chooses the backend."""
    monkeypatch.setitem(sys.modules, PLACE, request.param)
    found: ModuleType = request.param
    return found


def draw(head_dim: int = 64) -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(4096, 4, head_dim, dtype=torch.bfloat16, device="cuda:0")


def takes(module: ModuleType) -> str:
    return choose(module, draw(), 4096)


def test_torch_takes_cudnn_though_algorithms_must_be_deterministic(module: ModuleType) -> None:
    assert takes(module) == "cudnn_attention"
    torch.use_deterministic_algorithms(mode=True)
    assert takes(module) == "cudnn_attention"


def test_an_active_provider_goes_first_where_it_is_asked_to(module: ModuleType) -> None:
    activate(varlen_first=True)
    assert takes(module) == "flash_attention"
    activate()
    assert takes(module) == "cudnn_attention"


def test_an_active_provider_goes_first_in_deterministic_mode(module: ModuleType) -> None:
    activate()
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    assert takes(module) == "cudnn_attention", "as torch's selector of SDPA has it"
    torch.use_deterministic_algorithms(mode=True)
    assert takes(module) == "flash_attention"


def test_the_choice_is_given_back(module: ModuleType) -> None:
    before = dict(vars(module))
    activate(varlen_first=True)
    deactivate()
    assert dict(vars(module)) == before
    activate()
    assert takes(module) == "cudnn_attention", "the wish ends with the activation"


def test_a_choice_that_was_replaced_by_others_is_left_alone(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    activate(varlen_first=True)
    name = "_select_backend" if hasattr(module, "_select_backend") else "_can_use_cudnn"
    ours = getattr(module, name)
    monkeypatch.setattr(module, name, print)
    deactivate()
    assert getattr(module, name) is print
    monkeypatch.setattr(module, name, ours)
    monkeypatch.undo()


def test_another_provider_ends_it(module: ModuleType) -> None:
    attention.register_flash_attention_impl("other", register_fn=Other)
    activate(varlen_first=True)
    attention.activate_flash_attention_impl("other")
    assert takes(module) == "cudnn_attention"
    attention.restore_flash_attention_impl()


class Other:
    def remove(self) -> None:
        """Do nothing."""


def test_heads_for_which_flash_has_no_kernel_stay_with_cudnn(module: ModuleType) -> None:
    activate(varlen_first=True)
    query, value = draw(128), draw(64)
    if hasattr(module, "_select_backend"):
        bounds: Any = torch.zeros(2, dtype=torch.int32)
        args = query, query, value, bounds, bounds, 4096, [-1, -1]
        assert module._select_backend(*args) == CUDNN
    else:
        assert module._can_use_cudnn(query, query, value, 4096, [-1, -1])


def test_what_torch_gives_to_flash_stays_there(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91700)  # too old for torch
    activate()
    assert takes(module) == "flash_attention"
    activate(varlen_first=True)
    assert takes(module) == "flash_attention"


@pytest.mark.parametrize("name", [name for name in MODULES if name != "2.14"])
def test_the_remedies_of_the_docs_hold_in_torch_2_15(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MODULES[name]
    monkeypatch.setitem(sys.modules, PLACE, module)
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        assert takes(module) == "flash_attention"
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    assert takes(module) == "flash_attention"
    torch.backends.cuda.enable_cudnn_sdp(enabled=True)
    query, bounds = draw(), torch.zeros(2, dtype=torch.int32)
    args: Any = (query, query, query, bounds, bounds, 4096, [-1, -1])
    assert module._select_backend(*args, num_splits=1) == FLASH
    with attention.sdpa_kernel(attention.SDPBackend.MATH):
        assert takes(module) == "nothing"


def test_the_remedies_of_torch_2_15_do_not_hold_in_2_14() -> None:
    with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
        assert takes(torch_2_14) == "cudnn_attention"
    query = draw()
    assert not torch_2_14._can_use_cudnn(query, query, query, 4096, [-1, -1], num_splits=1)


def test_an_order_that_sdpa_kernel_gives_goes_before_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(attention, "_is_sdp_priority_order_active"):
        told = torch_2_15._is_sdp_priority_order_active
        monkeypatch.setattr(attention, "_is_sdp_priority_order_active", told, raising=False)
    module = MODULES.get("here", torch_2_15)
    monkeypatch.setitem(sys.modules, PLACE, module)
    activate(varlen_first=True)
    backends = [attention.SDPBackend.CUDNN_ATTENTION, attention.SDPBackend.FLASH_ATTENTION]
    token = torch_2_15._sdpa_kernel_uses_priority.set(True)  # as `sdpa_kernel` of torch 2.15 does
    with attention.sdpa_kernel(backends, set_priority=True):
        assert takes(module) == "cudnn_attention"
    torch_2_15._sdpa_kernel_uses_priority.reset(token)
    assert takes(module) == "flash_attention"


def test_torch_before_2_14_takes_flash_and_nothing_is_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = ModuleType("varlen")
    older.__dict__["_should_use_cudnn"] = lambda _: False
    monkeypatch.setitem(sys.modules, PLACE, older)
    before = dict(vars(older))
    activate(varlen_first=True)
    assert takes(older) == "flash_attention"
    assert dict(vars(older)) == before


def test_a_rule_that_is_not_known_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PLACE, ModuleType("varlen"))
    with pytest.raises(FlashDistError, match=r"varlen_first must be False with torch 2.*got True"):
        activate(varlen_first=True)
    assert attention.current_flash_attention_impl() is None
    activate()
    assert torch_sdpa.status().varlen == ()


def test_a_graph_is_traced_with_the_choice_of_that_moment() -> None:
    prefer(always=True)

    def add(x: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = x + order._goes_first()
        return total

    graph = torch.compile(add, backend="eager", fullgraph=True)
    assert int(graph(torch.zeros(()))) == 1
    prefer(always=False)


def test_the_status_names_who_serves_varlen_attn() -> None:
    status = Status(None, ("flash_attention",) * 2, ("flash_attention", "cudnn_attention"))
    wanted = "torch's own kernels are its flash backend; varlen_attn goes first to cudnn on GPU 1"
    assert str(status) == wanted


@pytest.mark.parametrize(
    ("version", "options", "wanted"),
    [
        ("2.13.0", None, ""),
        ("", None, ""),
        ("2.14.1+cu130", None, "; so does varlen_attn, deterministic or not"),
        ("2.15.0", {}, "; so does varlen_attn, unless `activate(varlen_first=True)`"),
        ("2.15.0", {"varlen_first": True}, "; varlen_attn runs on flash_dist"),
    ],
)
def test_doctor_is_told_who_serves_varlen_attn(
    version: str, options: dict[str, bool] | None, wanted: str
) -> None:
    if options is not None:
        activate(**options)
    said = torch_sdpa.describe([Device(9, 0)], version)
    assert said.endswith(f"torch asks cuDNN first, unless deterministic{wanted}")
