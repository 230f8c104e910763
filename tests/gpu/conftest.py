"""GPU tests run from an installed wheel; without a GPU each test is skipped with the reason.

FLASH_DIST_TEST_PTX=80 requires that the driver compiled every launched kernel from PTX of
compute_80; FLASH_DIST_TEST_PTX=sass requires that the driver compiled none. Under
FLASH_DIST_SMEM_LIMIT every kernel must be that of the largest plan that fits.
FLASH_DIST_TEST_DEVICE=cpu runs the device-independent tests on the reference, to test the tests
themselves. --share 2/5 runs every fifth test from the second on, to save time.
"""

from __future__ import annotations

import os
import re
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest

pytest.importorskip("torch")

import torch

from tests.reference import DEVICE

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEN: dict[str, dict[str, object]] = {}
DTYPE_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
KERNELS = {**DTYPE_NAMES, "ieee32": torch.float32}  # names of dtype and arithmetic in kernels
HALVES: Final = ("fp16", "bf16")
TILES_FOR_MANY: Final = 226  # the plan of large tiles; plan 227 has the tiles for few queries

# head_dim, head_dim_v: every compiled size
COMPILED: Final = {
    **{f"d{dim}": (dim, dim) for dim in (32, 64, 96, 128, 160, 192, 224, 256, 384, 512)},
    "d192-128": (192, 128),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for a share of the tests."""
    parser.addoption("--share", default="1/1", metavar="I/N", help="every N-th test from the I-th")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the requested share, and skip tests that the present device cannot run."""
    first, step = map(int, config.getoption("--share").split("/"))
    items[:] = items[first - 1 :: step]
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        if DEVICE == "cpu" and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="FLASH_DIST_TEST_DEVICE=cpu: needs a GPU"))
        if DEVICE != "cpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise tests with every dtype (`half`: 16 bits) and compiled size (`head_dims`)."""
    names = metafunc.fixturenames
    if "dtype" in names:
        metafunc.parametrize("dtype", list(DTYPE_NAMES.values()), ids=list(DTYPE_NAMES))
    if "half" in names:
        metafunc.parametrize("half", [DTYPE_NAMES[name] for name in HALVES], ids=HALVES)
    if "head_dims" in names:
        metafunc.parametrize("head_dims", list(COMPILED.values()), ids=list(COMPILED))


@cache
def built() -> dict[torch.dtype, int]:
    """Return the largest head_dim of this build's kernels, by dtype."""
    if DEVICE == "cpu":
        return dict.fromkeys(DTYPE_NAMES.values(), 512)
    from flash_dist.toolkit.loading.library import variants  # noqa: PLC0415

    largest: dict[torch.dtype, int] = {}
    for variant in variants():
        dtype = KERNELS[variant["dtype"]]
        largest[dtype] = max(largest.get(dtype, 0), variant["head_dim"])
    return largest


@pytest.fixture(autouse=True)
def built_kernels(request: pytest.FixtureRequest) -> None:
    """Skip a dtype and a head_dim without kernels in this build."""
    names = set(request.fixturenames)
    of_dtype = next((name for name in ("dtype", "half", "single") if name in names), None)
    if of_dtype is None:
        return
    largest = built().get(request.getfixturevalue(of_dtype))
    if largest is None:
        pytest.skip("this build has no kernels for the dtype")
    if "head_dims" in names and request.getfixturevalue("head_dims")[0] > largest:
        pytest.skip(f"this build has kernels up to head_dim {largest} for the dtype")


@pytest.fixture
def any_half() -> torch.dtype:
    """Return one 16-bit dtype of the build, preferably bfloat16."""
    return torch.bfloat16 if torch.bfloat16 in built() else torch.float16


@pytest.fixture
def single() -> torch.dtype:
    """Return float32, or skip."""
    if torch.float32 not in built():
        pytest.skip("this build has no kernels for float32")
    return torch.float32


@pytest.fixture
def fp16() -> torch.dtype:
    """Return float16, or skip."""
    if torch.float16 not in built():
        pytest.skip("this build has no kernels for float16")
    return torch.float16


@pytest.fixture(autouse=True)
def loaded_variants() -> Iterator[None]:
    """Record each launched variant; compare it with its name and with the run's requirements."""
    yield
    if DEVICE == "cpu":
        return
    from flash_dist import last_variant  # noqa: PLC0415

    for role, loaded in last_variant().items():
        SEEN[loaded["symbol"]] = {"role": role, **loaded}
        _check_loaded(loaded, os.environ.get("FLASH_DIST_TEST_PTX"))
        _check_plan(loaded, os.environ.get("FLASH_DIST_SMEM_LIMIT"))


def _check_loaded(loaded: dict[str, Any], demanded: str | None) -> None:
    target = loaded["symbol"].rpartition("_")[2]  # sm90a or compute80
    kind, number = target.rstrip("0123456789af"), int(re.sub(r"\D", "", target))
    major, minor = torch.cuda.get_device_capability(loaded["device"])
    assert loaded["ptx_version"] == number, loaded
    binary = number if kind == "sm" else 10 * major + minor
    assert loaded["binary_version"] == binary, loaded
    if demanded:
        assert target.startswith("sm") if demanded == "sass" else target == f"compute{demanded}"


def _check_plan(loaded: dict[str, Any], limit: str | None) -> None:
    """Check that a variant is the largest plan of its target within the run's limit."""
    if not limit:
        return
    from flash_dist.toolkit.loading.library import variants  # noqa: PLC0415

    gpu: Any = torch.cuda.get_device_properties(loaded["device"])
    room = min(int(limit), gpu.shared_memory_per_block_optin)
    assert loaded["plan"] * 1024 <= room, f"{loaded} under FLASH_DIST_SMEM_LIMIT={limit}"
    names = ("family", "dtype", "head_dim", "head_dim_v", "target")
    built = variants()
    (ours,) = (x for x in built if x["symbol"] == loaded["symbol"])
    plans = [x["plan"] for x in built if all(x[name] == ours[name] for name in names)]
    fitting = [plan for plan in plans if plan * 1024 <= room]
    # The largest GPUs have two plans; the shape decides between them.
    largest = {TILES_FOR_MANY, max(fitting)} if TILES_FOR_MANY in fitting else {max(fitting)}
    assert loaded["plan"] in largest, f"{loaded} of plans {plans}, {room} bytes"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every launched variant."""
    for symbol, loaded in sorted(SEEN.items()):
        terminalreporter.write_line(
            f"loaded {symbol}: binaryVersion {loaded['binary_version']}, "
            f"ptxVersion {loaded['ptx_version']}"
        )
