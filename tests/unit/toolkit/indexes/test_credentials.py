"""Private indexes: each server gets its own credentials, and no other server gets them."""

from __future__ import annotations

import base64
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from flash_dist.toolkit.errors import FetchError
from flash_dist.toolkit.indexes import credentials
from flash_dist.toolkit.indexes.credentials import find_login, without_credentials
from flash_dist.toolkit.indexes.fetch import open_url, read_page
from flash_dist.toolkit.indexes.index import read_index
from flash_dist.toolkit.indexes.pages import parse_page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.unit.made.command import Cli

WHEEL = "flash_dist-0.1.0+cu130.hopper-py3-none-manylinux_2_34_x86_64.whl"
PAGE = f'<a href="/files/{WHEEL}">x</a>'.encode()


class Private:
    """A server that answers one user, and records its requests."""

    def __init__(self) -> None:
        self.told: list[str | None] = []
        self.redirect = ""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.told.append(self.headers.get("Authorization"))
                wanted = base64.b64encode(b"bob:s@cret").decode()
                if outer.redirect and self.path == "/go/":
                    self.send_response(302)
                    self.send_header("Location", outer.redirect)
                    self.end_headers()
                    return
                good = outer.told[-1] == f"Basic {wanted}"
                self.send_response(200 if good else 401)
                self.send_header("Content-Type", "text/html")
                self.end_headers()
                self.wfile.write(PAGE)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Private]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            thread.join()
            self._server.server_close()


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Private]:
    monkeypatch.setattr(credentials, "_given", {})
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("UV_INDEX", "UV_DEFAULT_INDEX", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Private().running() as server:
        yield server


def fetch(url: str) -> str:
    with open_url(url) as response:
        return read_page(response)


def test_without_credentials_a_private_index_refuses(private: Private) -> None:
    with pytest.raises(FetchError, match="HTTP 401"):
        fetch(f"http://{private.host}/simple/")
    assert private.told == [None]


def test_credentials_of_an_address_are_used_and_not_shown(private: Private) -> None:
    url = f"http://bob:s%40cret@{private.host}/simple/flash-dist/"
    index = read_index(url)
    (wheel,) = index.wheels
    assert wheel.location == f"http://{private.host}/files/{WHEEL}"
    assert "cret" not in index.place + wheel.index
    assert fetch(wheel.location)  # the file is private, too
    with pytest.raises(FetchError) as caught:
        fetch(f"http://eve:s%40cret@{private.host}/x")
    assert "cret" not in str(caught.value)


def test_uvs_variables_are_used(private: Private, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_INDEX", f"other=http://other/ my-own=http://{private.host}/simple/")
    monkeypatch.setenv("UV_INDEX_MY_OWN_USERNAME", "bob")
    monkeypatch.setenv("UV_INDEX_MY_OWN_PASSWORD", "s@cret")
    assert fetch(f"http://{private.host}/simple/")


def test_netrc_is_used(private: Private, tmp_path: Path) -> None:
    path = tmp_path / "netrc"
    path.write_text("machine 127.0.0.1 login bob password s@cret\n")
    path.chmod(0o600)
    assert fetch(f"http://{private.host}/simple/")


def test_a_netrc_that_is_none_is_a_warning_without_its_words(
    private: Private, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "netrc").write_text("s@cret is no word\n")
    with caplog.at_level(logging.WARNING, logger="flash_dist"), pytest.raises(FetchError):
        fetch(f"http://{private.host}/simple/")
    assert "is not read: NetrcParseError" in caplog.text
    assert "s@cret" not in caplog.text


def test_a_redirection_takes_no_password_to_another_server(private: Private) -> None:
    with Private().running() as other:
        private.redirect = f"http://{other.host}/simple/"
        with pytest.raises(FetchError, match="HTTP 401"):
            fetch(f"http://bob:s%40cret@{private.host}/go/")
        assert other.told == [None]
    private.redirect = f"http://{private.host}/simple/"
    assert fetch(f"http://{private.host}/go/")  # its own server receives them again


@pytest.mark.parametrize(
    ("url", "clean", "login"),
    [
        ("https://a:b@h/x?y#z", "https://h/x?y#z", ("a", "b")),
        ("HTTPS://a:b@h:8443/", "https://h:8443/", ("a", "b")),
        ("https://token@h/", "https://h/", ("token", "")),
        ("https://a:b@c@h/", "https://h/", ("a", "b@c")),
        ("https://a:b@[::1]/", "https://[::1]/", ("a", "b")),
        ("https://h/a:b@c", "https://h/a:b@c", None),
        ("file:///a:b@c", "file:///a:b@c", None),
        ("https://a:b@[", "https://[", None),
        ("https://a:b/c@h/", "https://h/", None),  # a slash in a password must be encoded
        ("ftp://a:b@h/x", "ftp://h/x", None),
        ("https://h?x=a@b", "https://h?x=a@b", None),
    ],
)
def test_an_address_is_taken_apart(
    url: str, clean: str, login: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(credentials, "_given", {})
    assert without_credentials(url) == clean
    assert find_login(clean, {"NETRC": "/absent"}) == login
    assert find_login("https://another/", {"NETRC": "/absent"}) is None


@pytest.mark.parametrize(
    ("before", "code"),
    [("http://bob:s%40cret@", 0), ("HTTP://bob:s%40cret@", 0), ("ftp://bob:s%40cret@", 2),
     ("http://bob:s/%40cret@", 2), ("http://bob:s%40cret@[", 2), ("http://bob:s%40cret@none.", 2)],
)  # fmt: skip
def test_the_command_line_shows_no_password(
    private: Private, before: str, code: int, cli: Cli
) -> None:
    given = ["--gpu", "9.0", "--driver", "580", "--index", f"{before}{private.host}/simple/"]
    for words in (["select", *given], ["select", *given, "--json"]):
        assert "cret" not in "".join(cli(*words, status=code))


def test_a_page_of_a_server_names_no_files_of_this_machine() -> None:
    text = f'<base href="file:///etc/"><a href="file:///tmp/{WHEEL}">x</a><a href="a.whl">y</a>'
    assert parse_page(text, "https://example.org/simple/") == ()
    assert len(parse_page(text, "file:///simple/index.html")) == 2
