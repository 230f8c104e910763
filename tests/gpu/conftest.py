"""GPU tests run from an installed wheel; without a GPU each skips with the reason.

FLASH_DIST_TEST_PTX=80 demands that the driver made every kernel launched from PTX of that number,
FLASH_DIST_TEST_PTX=sass that it made none from PTX.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

if TYPE_CHECKING:
    from collections.abc import Iterator

SEEN: dict[str, dict[str, object]] = {}
DTYPE_NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything here where there is no GPU."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="torch sees no CUDA GPU"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes `dtype` for each dtype of the build."""
    if "dtype" in metafunc.fixturenames:
        metafunc.parametrize("dtype", list(DTYPE_NAMES.values()), ids=list(DTYPE_NAMES))


@pytest.fixture(autouse=True)
def built_dtypes(request: pytest.FixtureRequest) -> None:
    """Skip a dtype that this build has no kernels for."""
    if "dtype" not in request.fixturenames:
        return
    from flash_dist._native import variants  # noqa: PLC0415

    built = {DTYPE_NAMES[variant["dtype"]] for variant in variants()}
    if request.getfixturevalue("dtype") not in built:
        pytest.skip("this build has no kernels for the dtype")


@pytest.fixture(autouse=True)
def loaded_variants() -> Iterator[None]:
    """Record which variant each launch loaded; hold it against its name and the run's demand."""
    yield
    from flash_dist import last_variant  # noqa: PLC0415

    for family, loaded in last_variant().items():
        SEEN[loaded["symbol"]] = {"family": family, **loaded}
        _check_loaded(loaded, os.environ.get("FLASH_DIST_TEST_PTX"))


def _check_loaded(loaded: dict[str, Any], demanded: str | None) -> None:
    target = loaded["symbol"].rpartition("_")[2]  # sm90a or compute80
    kind, number = target.rstrip("0123456789af"), int(re.sub(r"\D", "", target))
    major, minor = torch.cuda.get_device_capability(loaded["device"])
    assert loaded["ptx_version"] == number, loaded
    binary = number if kind == "sm" else 10 * major + minor
    assert loaded["binary_version"] == binary, loaded
    if demanded:
        assert target.startswith("sm") if demanded == "sass" else target == f"compute{demanded}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print every variant that was launched."""
    for symbol, loaded in sorted(SEEN.items()):
        terminalreporter.write_line(
            f"loaded {symbol}: binaryVersion {loaded['binary_version']}, "
            f"ptxVersion {loaded['ptx_version']}"
        )
