"""Four wheels of other projects, fetched from PyPI, are read as cuobjdump reads them.

They are small and differ: LZ4 and zstd, linked on the device and not, PTX of CUDA 12 and 13, code
for 15 GPUs, and names that are older than `sm_90a`.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Final

import pytest

from flash_dist.toolkit.binaries.wheel import open_wheel
from tests.readers.compared import Ours, compare
from tests.readers.tools import needs

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = needs("cuobjdump")

# Each wheel, its libraries with GPU code, and the number of their images.
WHEELS: Final = {
    "nvidia-nvjpeg-cu12==12.4.0.76": {"libnvjpeg.so.12": 175},
    "torchaudio==2.11.0": {"libtorchaudio.abi3.so": 21, "torchaudio_prefixctc.abi3.so": 7},
    "torchvision==0.26.0": {"_C.so": 42, "libnvjpeg.36e11081.so.13": 120},
    "xformers==0.0.35": {"_C.so": 44},
}
PLATFORM: Final = (
    *("--only-binary", ":all:", "--python-version", "3.12", "--implementation", "cp"),
    *("--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64"),
)
PATIENCE: Final = 120  # seconds


def fetch(requirement: str, folder: Path) -> Path:
    """Download one wheel; skip if PyPI is unreachable."""
    options = ("--quiet", "--no-deps", "--retries", "1", "--timeout", "15", *PLATFORM)
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder)]
    try:
        done = subprocess.run(
            [*command, requirement], check=False, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"PyPI did not give {requirement} within {PATIENCE} s")
    found = list(folder.glob("*.whl"))
    if not found:
        why = (done.stderr.strip() or "pip says nothing").splitlines()[-1]
        pytest.skip(f"PyPI does not give {requirement}: {why}")
    return found[0]


@pytest.mark.parametrize("requirement", WHEELS)
def test_every_image_and_kernel_of_a_foreign_wheel_is_read(
    tmp_path: Path, requirement: str
) -> None:
    found: dict[str, int] = {}
    with open_wheel(fetch(requirement, tmp_path)) as wheel:
        for number, name in enumerate(wheel.libraries):
            folder = tmp_path / str(number)
            folder.mkdir()
            library = folder / "library.so"
            with wheel.unpacked(name) as file:
                library.write_bytes(file.read())
            if Ours(library).entries:
                found[name.rpartition("/")[2]] = len(compare(library, folder).entries)
    assert found == WHEELS[requirement]
