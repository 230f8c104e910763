"""The page of `doctor --report`: its contents, omissions, and escaping."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

import pytest

from flash_dist.toolkit.cli import main
from flash_dist.toolkit.doctor.examine import Examination, examine
from flash_dist.toolkit.findings import FINDINGS
from flash_dist.toolkit.loading.parts import Loading
from flash_dist.toolkit.machine.install_files import InstallFiles
from flash_dist.toolkit.machine.installed import Installed
from flash_dist.toolkit.machine.libcuda import Cuda, Gpu
from flash_dist.toolkit.machine.torch_install import Torch
from flash_dist.toolkit.report_page import make_page
from flash_dist.toolkit.targets.devices import Device
from tests.unit.made.builds import ALL, HOPPER, Passes, make_environment, make_what_if
from tests.unit.made.fatbin_builder import SASS, Kernel, container, cubin, entry, library
from tests.unit.toolkit.test_redaction import ALICE

if TYPE_CHECKING:
    from pathlib import Path

    from flash_dist.toolkit.checks.environment import Environment
    from tests.unit.made.command import Cli

HOSTILE = "</title></style><script>alert(1)</script><img src=x onerror='alert(2)'> & \x1b[2J \u202e"
VOID = {"meta", "br"}


class Page(HTMLParser):
    """Reads a page, and checks that every element is closed in its place."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.attributes: set[str] = set()
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}
        self.ids += [str(value) for name, value in attrs if name == "id"]
        self.links += [str(value) for name, value in attrs if name in {"href", "src"}]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def write(environment: Environment, **options: Any) -> str:  # noqa: ANN401 - of Examination
    results = tuple(examine(environment, selftest=options.pop("selftest", None)))
    document = Examination(environment, results).to_json(**options)
    return make_page(document, ALICE, version="0.1.0+cu130.test", written="2026-01-05 10:00 UTC")


def failing() -> Environment:
    environment = make_environment(HOPPER, "8.6", "9.0", "12.0")
    folder = "/home/alice/venv/lib/python3.11/site-packages"
    return replace(
        environment,
        files=InstallFiles("recorded", folder, 200, ("flash_dist/_C.so",)),
        loading=Loading("failed", "extension", f"{folder}/flash_dist/_C.so: not found"),
        variables={"CUDA_CACHE_PATH": "/scratch/alice/cache"},
    )


def test_a_failing_machine_is_told_from_the_verdict_to_the_facts() -> None:
    page = Page(write(failing()))
    assert "4 checks failed" in page.text
    for part in (
        "flash_dist 0.1.0+cu130.test · driver 580.65.06 (CUDA 13.0)",
        "What to do fail install",
        "kernel GPU 0 GPU A, 8.6 GPU 1 GPU B, 9.0 GPU 2 GPU C, 12.0",
        "none native sm_90a none",
        FINDINGS["install-damaged"].title,
        "1 file is missing in ~/venv/lib/python3.11/site-packages",
        "Variables CUDA_CACHE_PATH /scratch/<user>/cache",
        "torch 2.11.0 (CUDA 13.0)",
        "Driver 580.65.06 (CUDA 13.0)",
    ):
        assert part in page.text
    checks = page.text.index("Checks")
    assert page.text.index("What to do") < page.text.index("GPUs and kernels") < checks


def test_every_finding_of_the_page_is_explained_in_it_and_every_link_leads_there() -> None:
    page = Page(write(failing()))
    assert {"install-damaged", "extension-failed", "no-matching-code"} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert {link.removeprefix("#") for link in page.links} <= set(page.ids)


def test_a_good_machine_has_nothing_to_do() -> None:
    page = Page(write(make_environment(ALL, *["9.0"] * 8), selftest=Passes()))
    assert page.text.count("No failure") == 2  # title and verdict
    assert "What to do" not in page.text
    assert "What the findings mean" not in page.text
    assert "selftest 7 bit-equal" in page.text


def test_equal_gpus_with_equal_results_share_a_column() -> None:
    environment = make_environment(ALL, *["9.0"] * 3, "8.6", "9.0")
    gpus = tuple(replace(gpu, name=f"GPU {gpu.device}") for gpu in environment.cuda.gpus)
    page = Page(write(replace(environment, cuda=replace(environment.cuda, gpus=gpus))))
    assert "kernel GPUs 0-2, 4 GPU 9.0, 9.0 GPU 3 GPU 8.6, 8.6 fwd" in page.text


def test_a_what_if_does_not_tell_of_the_machine_it_was_asked_on() -> None:
    page = Page(write(make_what_if(ALL, "7.5", "11.0")))
    verdict = page.text[: page.text.index("GPUs and kernels")]
    assert "what if" in verdict
    assert "compute capability 7.5 · compute capability 11.0" in verdict
    assert "Python" not in verdict
    assert "not on this GPU the GPU lacks instructions or memory" in page.text


def test_a_what_if_tells_no_fact_that_nobody_looked_at() -> None:
    text = Page(write(make_what_if(ALL, "7.5"))).text
    assert "Build flash_dist 0.1.0+cu130.test" in text
    assert "without a record of pip" not in text
    assert "Loads" not in text


def test_a_what_if_about_a_wheel_does_not_name_the_build_that_is_installed() -> None:
    text = Page(write(replace(make_what_if(ALL, "7.5"), installed=Installed()))).text
    facts = text.partition("Environment Asked on")[2]
    assert "flash_dist 0.1.0+cu130.test" not in text.partition("Written by")[0]
    assert "Build none" not in facts


def test_strict_and_no_gpu_have_verdicts_of_their_own() -> None:
    tested = replace(make_environment(ALL, "9.0"), torch=Torch("ok", "2.16.0", "13.0"))
    assert "1 warning, which count as failures" in Page(write(tested, strict=True)).text
    assert "No failure, 1 warning" in Page(write(tested)).text
    empty = replace(make_environment(ALL), cuda=Cuda("absent", reason="libcuda.so.1 was not found"))
    assert "Nothing could be checked: there is no GPU" in Page(write(empty)).text


def test_hostile_names_stay_text() -> None:
    gpus = (Gpu(0, HOSTILE, Device(12, 0)),)
    environment = make_environment(HOPPER)
    hostile = replace(
        environment,
        system=HOSTILE,
        cuda=replace(environment.cuda, gpus=gpus),
        files=InstallFiles("recorded", f"/x/{HOSTILE}", 3, (HOSTILE,)),
        variables={"CUDA_CACHE_PATH": f'"{HOSTILE}`'},
    )
    text = write(hostile)
    page = Page(text)
    assert not {"script", "img"} & set(page.tags)
    assert page.attributes <= {
        *("class", "id", "href", "lang", "charset", "name", "content", "http-equiv"),
        *("scope", "role", "aria-label", "tabindex"),
    }
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "<script>alert(1)</script>" in page.text


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = write(failing())
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"url\(|@import|<link|<script", text)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text


def test_the_json_in_the_page_is_the_whole_document_without_names() -> None:
    page = Page(write(failing()))
    found = json.loads(next(word for word in page.words if word.startswith('{"version"')))
    assert found["checks"][2]["id"] == "install-damaged"
    assert found["environment"]["files"]["folder"].startswith("~/venv")
    assert "alice" not in json.dumps(found)


def test_doctor_writes_the_page_beside_what_it_prints(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cli: Cli
) -> None:
    monkeypatch.setattr("flash_dist.toolkit.cli.doctor.gather_environment", lambda _: failing())
    target = tmp_path / "report.html"
    out, err = cli("doctor", "--no-selftest", "--json", "--report", target, status=1)
    assert json.loads(out)["exit_code"] == 1
    assert err == f"report written to {target}\n"
    assert "4 checks failed" in Page(target.read_text()).text


def test_a_page_of_other_peoples_libraries(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lib = tmp_path / "lib<b>.so"
    lib.write_bytes(library(container(entry(SASS, 80, cubin(Kernel("alpha"))))))
    target = tmp_path / "report.html"
    status = main(["doctor", "--wheel", str(lib), "--gpu", "8.6,9.0", "--report", str(target)])
    assert status == 1
    capsys.readouterr()
    page = Page(target.read_text())
    assert "GPUs and libraries library GPU 0 8.6 GPU 1 9.0" in page.text
    assert "lib<b>.so same major sm_80 none built for sm_80" in page.text
    assert "What library-no-matching-code means".lower() in page.text.lower()


@pytest.mark.parametrize("name", ["report.txt", "absent/report.html", "folder.html"])
def test_a_page_that_cannot_be_written_is_refused_before_the_work(
    name: str, tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "folder.html").mkdir()
    out, err = cli("doctor", "--report", tmp_path / name, status=2)
    assert out == ""
    assert f"got `{tmp_path / name}`" in err
    assert "hint: `--report report.html`" in err
