"""GPUs by name: as written by people, drivers and shops."""

from __future__ import annotations

import pytest

from flash_dist.toolkit.errors import ArchError
from flash_dist.toolkit.targets.devices import Device
from flash_dist.toolkit.targets.gpus import SOLD
from flash_dist.toolkit.targets.products import find_device

NAMES = {
    "3.7": ["Tesla K80"],
    "5.2": ["GTX 980 Ti", "Tesla M60"],
    "6.0": ["Tesla P100-PCIE-16GB", "p100"],
    "6.1": ["GTX 1080 Ti", "gtx1060", "NVIDIA GeForce GTX 1050", "Tesla P40", "TITAN Xp"],
    "7.0": ["Tesla V100-SXM2-32GB", "v100", "TITAN V"],
    "7.5": ["T4", "Tesla T4", "RTX 2080 Ti", "rtx2070super", "GTX 1660 SUPER", "TITAN RTX",
            "Quadro RTX 6000", "NVIDIA T1000 8GB", "sm_75", "75", "7.5"],
    "8.0": ["A100", "NVIDIA A100-SXM4-80GB", "a30", "A800", "sm_80", "compute_80"],
    "8.6": ["RTX 3090", "rtx3090", "rtx-3090", "NVIDIA GeForce RTX 3090 Ti", "86",
            "RTX 3050 Ti Laptop GPU", "sm_86", "sm86", "8.6", "A10G", "A40", "RTX A6000", "a6000",
            "NVIDIA RTX A2000 12GB", "RTX 2050"],
    "8.7": ["Jetson AGX Orin", "Orin Nano", "Orin (nvgpu)"],
    "8.9": ["RTX 4090", "rtx4070tisuper", "RTX 4090 D", "L40S", "l4", "RTX 6000 Ada",
            "NVIDIA RTX 6000 Ada Generation", "RTX 4000 SFF Ada Generation"],
    "9.0": ["h200", "H100", "NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "H100 NVL", "GH200",
            "NVIDIA GH200 480GB", "sm_90a", "9.0a", "90", "H20", "H100-SXM5"],
    "10.0": ["B200", "NVIDIA B200", "GB200", "100", "sm_100f"],
    "10.3": ["B300", "GB300"],
    "11.0": ["Jetson Thor", "NVIDIA Thor", "Jetson AGX Thor Developer Kit"],
    "12.0": ["RTX 5090", "rtx5060ti", "NVIDIA GeForce RTX 5070 Laptop GPU", "RTX PRO 6000",
             "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "120", "RTX 5090 D"],
    "12.1": ["DGX Spark", "GB10", "NVIDIA GB10", "sm_121"],
    "13.0": ["13.0", "sm_130"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for number, names in NAMES.items() for name in names]
)
def test_a_gpu_is_found_by_its_name(name: str, number: str) -> None:
    assert find_device(f" {name} ") == Device.parse(number)


@pytest.mark.parametrize("chip", SOLD, ids=str)
def test_each_gpu_that_is_sold_has_names_here(chip: object) -> None:
    assert str(chip) in NAMES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("RTX 3990", "did you mean `RTX 3090`"),
        ("3090", "did you mean `RTX 3090`"),
        ("rtx 400", "did you mean `RTX 40"),
        ("H10O", "did you mean `H100`"),
        ("", "got ``"),
        ("8", "a GPU looks like `8.6`, `sm_86` or `RTX 3090`, got `8`"),
        ("750", "got `750`"),
        ("RX 7900 XTX", "got `RX 7900 XTX`"),
        ("8.6.1", "nvidia-smi"),
    ],
)
def test_a_text_that_names_no_gpu_gives_a_sentence_with_a_hint(name: str, words: str) -> None:
    with pytest.raises(ArchError) as caught:
        find_device(name)
    assert words in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("number", [3000, 4000, 5000, 6000])
def test_a_name_of_two_gpus_is_not_guessed(number: int) -> None:
    with pytest.raises(ArchError, match=rf"`rtx {number}` may be `Quadro RTX {number}` \(7.5\)"):
        find_device(f"RTX {number}")
    assert find_device(f"RTX {number} Ada") == Device(8, 9)
    assert find_device(f"Quadro RTX {number}") == Device(7, 5)
