"""Variant wheels: the wheel that uv's preview installs for a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.make.release.variants import describe_variant, write
from flash_dist.toolkit.make.wheels.artefacts import ArtefactError, read_artefact
from flash_dist.toolkit.targets.archs import DEFAULT_MACHINE, ArchSet
from tests.unit.made.whole_wheel import NAME, write_whole_wheel

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.make.wheels.artefacts import Artefact

PLAIN = NAME.replace("+cu130.hopper", "")
# The label that uv chooses for the driver's CUDA version and a GPU. No label: the default set.
CHOSEN = {
    ("13.0", "7.5"): "sm75to89",
    ("13.0", "8.6"): "sm75to89",
    ("13.0", "9.0"): "hopper",
    ("13.0", "10.0"): "blackwell",
    ("13.0", "12.0"): "blackwell",
    ("12.4", "9.0"): "sm75to90",
    ("13.0", "11.0"): "",
    ("", ""): "",
}


def make(one: Artefact, archset: ArchSet) -> Artefact:
    """Return the same wheel with the declaration of another set."""
    toolkit = replace(one.manifest.toolkit, cuda=archset.toolkit)
    return replace(one, manifest=replace(one.manifest, arch_set=archset, toolkit=toolkit))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[Artefact]:
    one = read_artefact(write_whole_wheel(tmp_path_factory.mktemp("dist") / "hopper"))
    return [make(one, each) for each in published_sets() if each.machine == DEFAULT_MACHINE]


def test_each_set_but_the_default_one_is_a_variant(tmp_path: Path, sets: list[Artefact]) -> None:
    paths = write(tmp_path / "out", sets)
    labels = [path.name.removeprefix(PLAIN[:-4]).removesuffix(".whl") for path in paths]
    assert labels == ["", "-sm75to89", "-hopper", "-blackwell", "-sm75to90"]
    told = json.loads(
        (tmp_path / "out" / "flash-dist" / "flash_dist-0.1.0-variants.json").read_text()
    )
    assert list(told["variants"]) == sorted(label[1:] for label in labels[1:])
    for path, label in zip(paths, labels, strict=True):
        with zipfile.ZipFile(path) as wheel:
            names = [name for name in wheel.namelist() if name.endswith("/variant.json")]
            variants = {x: json.loads(wheel.read(x))["variants"] for x in names}
        one = {label[1:]: told["variants"][label[1:]]} if label else {}
        assert list(variants.values()) == ([one] if label else [])
    page = (tmp_path / "out" / "flash-dist" / "index.html").read_text()
    assert all(f'href="{path.name}#sha256=' in page for path in paths)


def test_uv_knows_targets_without_a_suffix(sets: list[Artefact]) -> None:
    one = make(sets[0], ArchSet.parse("8.9+PTX;9.0a"))
    assert describe_variant(one)["nvidia"]["sm_arch"] == ["89_real", "89_virtual", "90_real"]


def test_a_label_has_16_characters_at_most(tmp_path: Path, sets: list[Artefact]) -> None:
    own = make(sets[0], ArchSet.parse("8.0;8.6;8.9+PTX"))
    with pytest.raises(ArtefactError, match=r"at most 16 characters, got `sm80\.sm86\.sm89"):
        write(tmp_path / "out", [*sets, own])


@pytest.mark.slow
@pytest.mark.parametrize(("driver", "gpu"), CHOSEN, ids=map("-".join, CHOSEN))
def test_uv_installs_the_set_for_the_gpu(
    driver: str, gpu: str, tmp_path: Path, sets: list[Artefact]
) -> None:
    write(tmp_path / "out", sets)
    preview = ["--preview-features", "wheel-variants"] if gpu else []
    command = [sys.executable, "-m", "uv", "pip", "install", "--quiet", "--no-config", "--no-cache"]
    command += [*preview, "--no-deps", "--target", str(tmp_path / "site"), "--python"]
    command += [sys.executable, "--python-platform", "x86_64-manylinux_2_34", "--default-index"]
    provider = {"CUDA_DRIVER_VERSION": driver, "SM_ARCH": gpu} if gpu else {}
    forced = {f"NV_VARIANT_PROVIDER_FORCE_{name}": value for name, value in provider.items()}
    subprocess.run(
        [*command, (tmp_path / "out").as_uri(), "flash-dist"],
        env={**os.environ, **forced},
        check=True,
    )
    told = list((tmp_path / "site").glob("*.dist-info/variant.json"))
    assert [list(json.loads(path.read_text())["variants"]) for path in told] == (
        [[CHOSEN[driver, gpu]]] if CHOSEN[driver, gpu] else []
    )
