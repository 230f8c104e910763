"""Folders and package indexes: their wheels, and refused contents."""

from __future__ import annotations

import io
import json
import socket
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
from packaging.version import Version

from ci.install_tests.clients import serve
from flash_dist.toolkit.builds.published import published_sets
from flash_dist.toolkit.errors import FetchError
from flash_dist.toolkit.indexes import fetch
from flash_dist.toolkit.indexes.candidates import read_offer
from flash_dist.toolkit.indexes.index import parse_wheel, read_index
from flash_dist.toolkit.indexes.install_commands import find_commands
from flash_dist.toolkit.indexes.pages import Link, parse_page
from flash_dist.toolkit.indexes.patience import Patience
from flash_dist.toolkit.indexes.selection import Candidate, make_build
from flash_dist.toolkit.targets.archs import ArchSet
from tests.unit.made.builds import make_key
from tests.unit.made.wheels import write_dist, write_simple_index, write_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOPPER = "flash_dist-0.1.0+cu130.hopper-py3-none-manylinux_2_34_x86_64.whl"
NAMES = {one.name for one in published_sets()}


def commands(place: str, name: str) -> dict[str, str]:
    index = read_index(place)
    candidate = next(one for one in read_offer(index).candidates if one.name == name)
    return {command.tool: command.line for command in find_commands(candidate, index)}


def test_a_folder_offers_the_wheels_below_it_judged_by_their_manifests(tmp_path: Path) -> None:
    offer = read_offer(read_index(str(write_dist(tmp_path))))
    assert {one.name for one in offer.candidates} == NAMES
    assert offer.problems == ()
    hopper = next(one for one in offer.candidates if one.name == "hopper")
    assert min(one.key for one in hopper.build.variants) == make_key("bwd_delta", "bf16", 64, 64)
    path = tmp_path / "hopper" / HOPPER
    assert hopper.size == path.stat().st_size
    assert commands(str(tmp_path), "hopper") == {
        "pip": f"pip install {path}",
        "uv": f"uv pip install {path}",
    }
    assert commands(tmp_path.as_uri(), "hopper")["pip"] == f"pip install {path}"


def test_a_path_with_a_blank_is_quoted(tmp_path: Path) -> None:
    place = write_dist(tmp_path / "my wheels")
    assert commands(str(place), "all")["pip"].startswith("pip install '/")


def test_a_wheel_that_cannot_be_read_is_named_beside_the_others(tmp_path: Path) -> None:
    write_dist(tmp_path)
    (tmp_path / HOPPER.replace("0.1.0", "0.2.0")).write_bytes(b"PK")
    (tmp_path / "other-1.0-py3-none-any.whl").write_bytes(b"")
    (tmp_path / "flash_dist-1-py3-none-any-cu130_sm90.whl").write_bytes(b"")  # a variant wheel
    offer = read_offer(read_index(str(tmp_path)))
    assert {one.name for one in offer.candidates} == NAMES
    (problem,) = offer.problems
    assert "0.2.0+cu130.hopper" in problem
    assert "is not judged" in problem


def test_an_index_is_followed_to_the_project_and_judged_by_labels(tmp_path: Path) -> None:
    write_simple_index(tmp_path / "site", write_dist(tmp_path / "dist"))
    with serve(tmp_path / "site") as url:
        for place in (f"{url}simple/", f"{url}simple/flash-dist/"):
            index = read_index(place)
            assert {wheel.index for wheel in index.wheels} == {f"{url}simple/"}
            assert {wheel.requires_python for wheel in index.wheels} == {">=3.10"}
            offer = read_offer(index)
            assert {one.name for one in offer.candidates} == NAMES
            sizes = {one.name: one.size for one in offer.candidates}
            hopper = tmp_path / "dist" / "hopper" / HOPPER
            assert sizes["hopper"] == hopper.stat().st_size  # as told by the server
            assert commands(place, "hopper") == {
                "pip": 'pip install "flash_dist==0.1.0+cu130.hopper" '
                f"--extra-index-url {url}simple/",
                "uv": f'uv pip install "flash_dist==0.1.0+cu130.hopper" --index {url}simple/',
            }


PLAIN = {
    "nothing installed": ("", "", ""),
    "another version": ("0.0.9+cu130.hopper", "", ""),
    "the plain version": ("0.1.0", "", ""),
    "a label": (
        "0.1.0+cu130.hopper",
        " --force-reinstall --no-deps",
        " --reinstall-package flash-dist",
    ),
}


@pytest.mark.parametrize(("installed", "pip", "uv"), PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_wheel_is_the_default_set_and_replaces_a_labelled_one(
    installed: str, pip: str, uv: str, tmp_path: Path
) -> None:
    write_wheel(tmp_path / "dist", next(one for one in published_sets() if one.name == "all"))
    plain = tmp_path / "dist" / HOPPER.replace("+cu130.hopper", "")
    next((tmp_path / "dist").glob("*.whl")).rename(plain)
    write_simple_index(tmp_path / "site", tmp_path / "dist")
    with serve(tmp_path / "site") as url:
        index = read_index(f"{url}simple/")
        (candidate,) = read_offer(index).candidates
        assert (candidate.name, candidate.build.toolkit) == ("all", "13.0")
        found = find_commands(candidate, index, installed=installed)
        assert {one.tool: one.line for one in found} == {
            "pip": f'pip install "flash_dist==0.1.0" --extra-index-url {url}simple/{pip}',
            "uv": f'uv pip install "flash_dist==0.1.0" --index {url}simple/{uv}',
        }


def test_a_plain_wheel_beside_its_labelled_one_is_not_offered_twice(tmp_path: Path) -> None:
    write_dist(tmp_path)
    (labelled,) = (tmp_path / "all").glob("*.whl")
    (tmp_path / "pypi").mkdir()
    (tmp_path / "pypi" / labelled.name.replace("+cu130.all", "")).write_bytes(labelled.read_bytes())
    assert sorted(one.name for one in read_offer(read_index(str(tmp_path))).candidates) == sorted(
        NAMES
    )


def test_a_list_of_files_offers_addresses(tmp_path: Path) -> None:
    write_dist(tmp_path)
    with serve(tmp_path) as url:
        assert commands(url, "hopper")["pip"] == (
            f"pip install {url}hopper/{HOPPER.replace('+', '%2B')}"
        )


def test_a_conda_command_is_there_where_a_channel_is(tmp_path: Path) -> None:
    write_dist(tmp_path / "dist")
    folder = tmp_path / "dist" / "conda" / "linux-64"
    folder.mkdir(parents=True)
    for build in ("cuda124_hopper_0", "cuda130_all_0", "cuda130_hopper_0"):
        (folder / f"flash-dist-0.1.0-{build}.conda").write_bytes(b"")
    assert commands(str(tmp_path / "dist"), "hopper")["conda"] == (
        f'conda install -c {folder.parent} -c conda-forge "flash-dist=0.1.0=cuda130_hopper_0"'
    )
    assert "conda" not in commands(str(tmp_path / "dist"), "blackwell")


def test_without_an_index_the_wheel_is_built_first() -> None:
    from flash_dist.toolkit.indexes.selection import candidates_of  # noqa: PLC0415 - this test alone

    hopper = candidates_of(published_sets())[1]
    lines = [command.line for command in find_commands(hopper, None)]
    assert lines == [
        "nox -s build_wheels -- hopper",
        "pip install dist/hopper/*.whl",
        "uv pip install dist/hopper/*.whl",
    ]


def test_wheels_for_another_python_or_system_are_left_out_here(tmp_path: Path) -> None:
    hopper = published_sets()[1]
    write_wheel(tmp_path, hopper, tags="py3-none-win_amd64")
    write_wheel(tmp_path, hopper)
    assert len(read_offer(read_index(str(tmp_path))).candidates) == 2
    offer = read_offer(read_index(str(tmp_path)), python="3.11.0")
    assert len(offer.candidates) <= 1  # none on machines other than x86_64 Linux
    assert "wheels are not for this Python or system" in offer.problems[0]


@pytest.mark.parametrize(
    ("label", "name", "targets"),
    [
        ("hopper", "hopper", "sm_90a"),
        ("sm75to89", "turing-ampere-ada", "sm_75 sm_80 sm_86 sm_89 compute_89"),
        ("sm80.compute80", "sm80.compute80", "sm_80 compute_80"),
        ("sm100f", "sm100f", "sm_100f"),
    ],
)
def test_a_version_tells_the_targets(label: str, name: str, targets: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<a href="https://example.org/{HOPPER.replace("hopper", label)}">x</a>')
    wheel = read_index(str(page)).wheels[0]
    assert (wheel.label, wheel.toolkit) == (label, "13.0")
    assert wheel.version == Version(f"0.1.0+cu130.{label}")
    from flash_dist.toolkit.indexes.candidates import _read_label  # noqa: PLC0415 - no server is asked

    assert _read_label(wheel) == (name, tuple(sorted(ArchSet.parse(targets).archs)), "13.0")


def test_a_page_is_read_with_base_hashes_and_withdrawn_files() -> None:
    text = """<base href="/packages/"><a href="a-1-py3-none-any.whl#sha256=ab">a</a>
    <a data-yanked href="b-1-py3-none-any.whl">b</a> <a>none</a> <a href="">none</a>
    <a href="http://[">broken</a> <a href="javascript:alert(1)">no</a> <a href="../up/">up</a>"""
    links = parse_page(text, "https://example.org/simple/a/")
    assert links == (
        Link("https://example.org/packages/a-1-py3-none-any.whl", "sha256=ab"),
        Link("https://example.org/packages/b-1-py3-none-any.whl", yanked=True),
        Link("https://example.org/up/"),
    )


def test_json_of_an_index_is_read_with_sizes() -> None:
    file = {"filename": "x", "url": "a-1-py3-none-any.whl", "hashes": {"sha256": "ab"}, "size": 7}
    page = json.dumps({"files": [file, "no object", {}], "projects": [{"name": "a"}, {}]})
    assert parse_page(page, "https://example.org/simple/") == (
        Link("https://example.org/simple/a/"),
        Link("https://example.org/simple/a-1-py3-none-any.whl", "sha256=ab", size=7),
        Link("https://example.org/simple/"),
    )
    with pytest.raises(FetchError, match="cannot read the index"):
        parse_page("{", "https://example.org/simple/")


@pytest.mark.parametrize("name", ["a.whl", "a-1.whl", "a-x!-py3-none-any.whl", "a-1.tar.gz", ""])
def test_a_name_that_is_no_wheels_is_ignored(name: str) -> None:
    assert parse_wheel(Link(f"https://example.org/{name}")) is None


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("ftp://example.org/", "is http, https or file, got `ftp://"),
        ("file://example.org/x", "has no host"),
        ("/nowhere/at/all", "No such file"),
        ("http://127.0.0.1:1/", "cannot fetch `http://127.0.0.1:1/`: .*refused"),
        ("http://[/", "cannot fetch"),
    ],
)
def test_a_place_that_cannot_be_read_is_a_sentence(place: str, words: str) -> None:
    with pytest.raises(FetchError, match=words):
        read_index(place)


def test_a_refusal_of_a_server_or_a_file_that_is_no_page_gives_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(b"0")
    with serve(tmp_path) as url:
        with pytest.raises(FetchError, match="HTTP 404"):
            read_index(f"{url}absent/")
        with pytest.raises(FetchError, match="is no page of an index"):
            read_index(f"{url}file.bin")


def test_a_name_of_many_tags_is_no_wheel(tmp_path: Path) -> None:
    """The three sets of tags multiply: 400 x 3 x 400 are 480,000 objects."""
    many = [".".join(f"{kind}{n}" for n in range(size)) for kind, size in (("py", 300), ("p", 300))]
    name = f"flash_dist-1.0-{many[0]}-none.abi3.x-{many[1]}.whl"
    start = time.process_time()
    assert parse_wheel(Link(f"https://host/{name}")) is None
    assert time.process_time() - start < 0.5
    (tmp_path / "index.html").write_text(f'<a href="{name}">x</a>')
    assert read_index(str(tmp_path / "index.html")).wheels == ()


@contextmanager
def drip(answer: bytes) -> Iterator[str]:
    """Serve an answer byte by byte, ten a second, as long as the client waits."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped = threading.Event()

        def serve_one() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    for byte in answer:
                        connection.sendall(bytes([byte]))
                        if stopped.wait(0.1):
                            return

        thread = threading.Thread(target=serve_one, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}/simple/"
        finally:
            stopped.set()
    thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n"


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"X-Slow: " + b"y" * 9000,
        b"HTTP/1.1 200 OK\r\n" + b"a" * 9000,
        HEAD + b"Connection: close\r\n\r\n" + b" " * 9000,
        HEAD + b"Content-Length: 9000\r\n\r\n" + b" " * 9000,
    ],
    ids=["headers", "line", "page", "page-with-length"],
)
def test_a_server_that_drips_is_left(answer: bytes) -> None:
    with drip(answer) as url:
        start = time.monotonic()
        slow = pytest.raises(FetchError, match="it is not done after 1 seconds")
        with slow, fetch.open_url(url, patience=Patience(0.6)) as response:
            fetch.read_page(response)
        assert time.monotonic() - start < 5


def test_a_file_has_more_time_as_its_bytes_come(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(100_000))
    patience = Patience(5, 1000)
    with serve(tmp_path) as url, fetch.open_url(f"{url}file.bin", patience=patience) as response:
        fetch.save(response, io.BytesIO(), progress=lambda *_: None, patience=patience)
    assert 90 < patience.left < 105


def test_pages_of_one_index_share_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "index.html").write_text(f'<a href="{HOPPER}">x</a>')
    monkeypatch.setattr("flash_dist.toolkit.indexes.index.Patience", partial(Patience, 0))
    with serve(tmp_path) as url, pytest.raises(FetchError, match="not done after 0 seconds"):
        read_index(url)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Serve one raw answer, and hang up."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve_one() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve_one, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/simple/flash-dist/"
    thread.join()


def test_a_page_that_ends_too_soon_is_not_taken_for_the_whole() -> None:
    page = f'<a href="{HOPPER}">x</a>'.encode()
    head = HEAD + b"Content-Length: %d\r\n\r\n"
    with answering(head % len(page) + page) as url:
        assert [one.file_name for one in read_index(url).wheels] == [HOPPER]
    with (
        answering(head % (len(page) + 1) + page) as url,
        pytest.raises(FetchError, match=f"{len(page)} of {len(page) + 1} bytes came"),
    ):
        read_index(url)


@pytest.mark.parametrize(
    ("page", "refused"),
    [
        ('{"meta": {"api-version": "1.4"}, "files": []}', False),
        ('{"meta": {"api-version": "2.0"}, "files": []}', True),
        ('{"meta": {"api-version": 2}, "files": []}', True),
        ('<meta name="pypi:repository-version" content="1.3"><a href="a">a</a>', False),
        ('<meta name="pypi:repository-version" content="2.0"><a href="a">a</a>', True),
    ],
)
def test_a_page_of_a_newer_kind_is_refused(page: str, *, refused: bool) -> None:
    if refused:
        with pytest.raises(FetchError, match="it is of API version 2"):
            parse_page(page, "https://example.org/simple/a/")
    else:
        parse_page(page, "https://example.org/simple/a/")


@pytest.mark.parametrize("kind", ["html", "json"])
def test_a_page_of_more_links_than_any_is_refused_before_they_are_read(kind: str) -> None:
    count = 300_000
    text = f'<a href="{HOPPER}">x</a>' * count
    if kind == "json":
        text = json.dumps({"files": [{"url": HOPPER}] * count})
    start = time.process_time()
    with pytest.raises(FetchError, match="it has more than 50000 links"):
        parse_page(text, "https://example.org/simple/a/")
    assert time.process_time() - start < 20  # takes a third of that on the slowest machine


@pytest.mark.parametrize("place", ["file:///%00", "file:///a%00.html", "a\0b"])
def test_an_address_with_a_nul_is_a_sentence(place: str) -> None:
    with pytest.raises(FetchError, match=r"NUL|null"):
        read_index(place)


def test_a_link_of_a_page_that_names_no_file_is_none(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<a href="file:///%00/{HOPPER}">x</a><a href="file://host/{HOPPER}">x</a>')
    assert read_index(str(page)).wheels == ()


def test_the_command_for_a_file_insists_on_the_hash_that_its_link_names(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f'<a href="https://example.org/{HOPPER}#sha256={"a" * 64}">x</a>')
    (wheel,) = read_index(str(page)).wheels
    candidate = Candidate("hopper", make_build("hopper", (), "13.0"), wheel=wheel)
    (pip, uv) = find_commands(candidate, None)
    assert pip.line == f"pip install 'https://example.org/{HOPPER}#sha256={'a' * 64}'"
    assert uv.line == f"uv {pip.line}"


def test_a_wheel_at_hand_with_another_hash_than_its_page_names_is_not_judged(
    tmp_path: Path,
) -> None:
    write_simple_index(tmp_path / "site", write_dist(tmp_path / "dist"))
    page = tmp_path / "site" / "simple" / "flash-dist" / "index.html"
    assert len(read_offer(read_index(str(page))).candidates) == len(NAMES)
    (tmp_path / "site" / "files" / HOPPER).write_bytes(b"PK")
    offer = read_offer(read_index(str(page)))
    assert {one.name for one in offer.candidates} == NAMES - {"hopper"}
    assert "is not judged: " in offer.problems[0]
    assert "has the sha256 " in offer.problems[0]


@pytest.mark.parametrize(
    ("tags", "requires", "python", "fits"),
    [
        ("py3-none-manylinux_2_28_x86_64", ">=3.10", "3.12", True),
        ("py3-none-macosx_11_0_x86_64", ">=3.10", "3.12", False),
        ("py3-none-musllinux_1_2_x86_64", ">=3.10", "3.12", False),
        ("py3-none", ">=3.10", "3.9", False),
        ("py3-none", "", "3.9", False),
        ("py3-none", "", "3.15", True),
        ("py3-none", ">=3.13", "3.12.4", False),
        ("py3-none", ">=3.10", "3.15.0a1+", True),
        ("cp312-cp312", "", "3.12", True),
        ("cp312-cp312", "", "3.13", False),
        ("py3-none", ">=3.9", "3.13", True),
    ],
)
def test_a_wheel_fits_a_python_elsewhere_by_its_tags_and_what_it_requires(
    tags: str, requires: str, python: str, *, fits: bool
) -> None:
    whole = tags if tags.count("-") > 1 else f"{tags}-manylinux_2_28_aarch64"
    link = Link(f"https://h/flash_dist-1-{whole}.whl", "", requires)
    wheel = parse_wheel(link)
    assert wheel is not None
    assert wheel.fits(python, here=False) == fits


def test_a_download_is_bounded_and_tells_its_progress(tmp_path: Path) -> None:
    (tmp_path / "file.bin").write_bytes(bytes(100_000))
    seen: list[tuple[int, int | None]] = []
    with serve(tmp_path) as url:
        file = io.BytesIO()
        with fetch.open_url(f"{url}file.bin") as response:
            fetch.save(response, file, progress=lambda *step: seen.append(step))
        assert file.getvalue() == bytes(100_000)
        assert seen[-1] == (100_000, 100_000)
        with (
            fetch.open_url(f"{url}file.bin") as response,
            pytest.raises(FetchError, match="larger than 99999 bytes"),
        ):
            fetch.save(response, io.BytesIO(), progress=lambda *_: None, limit=99_999)
