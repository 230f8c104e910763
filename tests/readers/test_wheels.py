"""The libraries of our own wheels, if built, are read as cuobjdump reads them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash_dist.toolkit.binaries.wheel import open_wheel
from tests.readers.compared import compare, names
from tests.readers.tools import needs

pytestmark = needs("cuobjdump")

DIST = Path(__file__).resolve().parents[2] / "dist"
WHEELS = sorted(DIST.glob("*/*.whl"))


@pytest.mark.skipif(not WHEELS, reason="no wheel is in dist/, `nox -s small_wheel` builds one")
@pytest.mark.parametrize("path", WHEELS, ids=lambda path: path.parent.name)
def test_every_image_and_kernel_of_a_wheel_is_read(tmp_path: Path, path: Path) -> None:
    library = tmp_path / "kernels.so"
    with open_wheel(path) as wheel:
        (name,) = (one for one in wheel.libraries if one.endswith("_kernels.so"))
        with wheel.unpacked(name) as file:
            library.write_bytes(file.read())
    ours = compare(library, tmp_path)
    assert all(name.startswith("flash_dist_") for name in names(ours.kernels))
