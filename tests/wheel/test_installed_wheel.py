"""Tests in an environment with the wheel, torch and pytest, but without the source tree."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import flash_dist
from flash_dist.toolkit.builds.manifest import Manifest, load_manifest
from flash_dist.toolkit.checks.environment import gather_environment, prove_loading
from flash_dist.toolkit.gpucode.fatbin import open_fatbin

PACKAGE = Path(flash_dist.__file__).parent
LIBRARY = PACKAGE / "libflash_dist_kernels.so"


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return load_manifest()


def run_module(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flash_dist", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_the_package_under_test_is_the_installed_one() -> None:
    assert "site-packages" in PACKAGE.parts


def test_the_version_is_that_of_the_wheel(manifest: Manifest) -> None:
    assert flash_dist.__version__ == importlib.metadata.version("flash_dist")
    assert flash_dist.__version__ == manifest.package_version
    assert flash_dist.__version__.endswith(f".{manifest.arch_set.label}")


def test_the_console_script_is_the_command_line() -> None:
    script = Path(sysconfig.get_path("scripts")) / "flash-dist"
    done = subprocess.run([script], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run_module().stdout
    assert done.stdout.startswith("usage: python -m flash_dist")


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, flash_dist; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


def test_the_library_tells_the_variants_of_the_manifest(manifest: Manifest) -> None:
    library = ctypes.CDLL(str(LIBRARY))
    ask = library.flash_dist_variants_json
    ask.argtypes, ask.restype = [ctypes.c_char_p, ctypes.c_int64], ctypes.c_int64
    buffer = ctypes.create_string_buffer(ask(None, 0) + 1)
    ask(buffer, len(buffer))
    told = {(one["symbol"], one["dynamic_smem"]) for one in json.loads(buffer.value)}
    assert told == {(one.symbol, one.dynamic_smem) for one in manifest.kernels}


def test_the_code_embedded_is_the_code_declared(manifest: Manifest) -> None:
    with open_fatbin(LIBRARY) as fatbin:
        read = [one for entry in fatbin.report.select() for one in fatbin.kernels(entry)]
    embedded = {(kernel.name, kernel.arch) for kernel in read}
    assert embedded == {(kernel.symbol, kernel.target) for kernel in manifest.kernels}


def test_no_kernel_spills_but_those_with_an_exception(manifest: Manifest) -> None:
    spilling = {kernel.symbol for kernel in manifest.kernels if kernel.spill_bytes}
    excepted = re.compile(  # in csrc/spill_exceptions.toml
        r"_bwd_fused_sm90_\w+_d192v128_|_(fwd|bwd_fused)_dropout_sm90_\w+_d128_"
        r"|_bwd_fused_scored_sm90_bf16_d128_|_mla_(pair_)?sm90_bf16_"
    )
    assert not [symbol for symbol in spilling if not excepted.search(symbol)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_op_works_on_the_cpu(*, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 33, 4, 64, generator=generator) for _ in range(3))
    out = flash_dist.flash_attn_func(q.half(), k.half(), v.half(), causal=causal)
    q, k, v = (x.half().float().transpose(1, 2) for x in (q, k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), atol=2e-3, rtol=2e-3)


def test_the_binding_loads_under_this_torch() -> None:
    from flash_dist.kernels import operators  # noqa: F401, PLC0415

    assert torch.ops.flash_dist is not None


def test_loading_is_predicted_as_it_really_is() -> None:
    predicted = gather_environment()
    tried = prove_loading(predicted)
    assert (predicted.loading.source, tried.loading.source) == ("predicted", "tried")
    assert (predicted.loading.status, tried.loading.status) == ("ok", "ok"), tried.loading.reason


def test_doctor_without_selftest_imports_no_torch_and_starts_no_process() -> None:
    code = (
        "import sys\n"
        "started = []\n"
        "sys.addaudithook(lambda event, _: started.append(event) if event == 'subprocess.Popen' "
        "else None)\n"
        "from flash_dist.toolkit.cli import main\n"
        "main(['doctor', '--no-selftest', '--json'])\n"
        "assert 'torch' not in sys.modules and not started, started\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loading = json.loads(done.stdout)["environment"]["loading"]
    assert (loading["status"], loading["source"]) == ("ok", "predicted")


def test_doctor_says_that_a_fitting_gpu_is_served() -> None:
    done = run_module("doctor", "--gpu", "9.0", "--driver", "580")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "sm_90a" in done.stdout


def test_doctor_says_that_another_gpu_is_not(manifest: Manifest) -> None:
    done = run_module("doctor", "--gpu", "8.6", "--driver", "580", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout)["version"] == 1
    assert any(one.name == "turing-ampere-ada" for one in manifest.archsets)


def test_doctor_blames_the_driver_when_it_is_too_old() -> None:
    done = run_module("doctor", "--gpu", "9.0", "--driver", "535")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "580" in done.stdout


def test_inspect_lists_what_is_embedded() -> None:
    done = run_module("inspect", "--json", str(LIBRARY))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["libraries"][0]["archs"] == ["sm_90a"]
