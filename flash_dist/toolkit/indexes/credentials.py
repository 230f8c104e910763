"""Credentials for a private index, from its address, uv's variables or .netrc, as in pip and uv.

    https://user:password@host/simple/            for all requests to that server
    UV_INDEX_NAME_USERNAME, UV_INDEX_NAME_PASSWORD  where UV_INDEX or UV_DEFAULT_INDEX has NAME=URL
    NETRC, ~/.netrc                               a line `machine HOST login USER password PASSWORD`

A password is sent only to its own server, even after redirections, and appears in no message.
"""

from __future__ import annotations

import base64
import logging
import netrc
import os
import re
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit, urlunsplit

from ..redaction import without_login

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_log: Final = logging.getLogger(__name__)
_PORTS: Final = {"http": 80, "https": 443}

Origin = tuple[str, str, int]
Login = tuple[str, str]

# Logins by server, from addresses that the user named: links on the pages there contain no login.
_given: Final[dict[Origin, Login]] = {}


def without_credentials(url: str) -> str:
    """Return an address without its credentials, and store them for requests to its server."""
    try:
        parts = urlsplit(url)
        login, _, host = parts.netloc.rpartition("@")
        clean = urlunsplit(parts._replace(netloc=host))
        origin, _ = _origin_of(clean), parts.port  # raises for a malformed port
    except ValueError:  # such as `http://[`, or an unencoded password: the request reports it
        return without_login(url)
    if not login:
        return url
    user, _, password = login.partition(":")
    if origin is not None:
        _given[origin] = (unquote(user), unquote(password))
    return clean


def _origin_of(url: str) -> Origin | None:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, host, port) if host and port else None


def find_login(url: str, environ: Mapping[str, str]) -> Login | None:
    """Return the user and the password for an address; None if there are none."""
    origin = _origin_of(url)
    if origin is None:
        return None
    if origin in _given:
        return _given[origin]
    return _read_uv(origin, environ) or _read_netrc(origin[1], environ)


def _read_uv(origin: Origin, environ: Mapping[str, str]) -> Login | None:
    for name, url in _named_indexes(environ):
        if _origin_of(url) == origin:
            variable = f"UV_INDEX_{re.sub('[^A-Z0-9]', '_', name.upper())}"
            user = environ.get(f"{variable}_USERNAME", "")
            password = environ.get(f"{variable}_PASSWORD", "")
            if user or password:
                return user, password
    return None


def _named_indexes(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for variable in ("UV_INDEX", "UV_DEFAULT_INDEX"):
        for word in environ.get(variable, "").split():
            name, separator, url = word.partition("=")
            if separator and "/" not in name:
                yield name, url


def _read_netrc(host: str, environ: Mapping[str, str]) -> Login | None:
    place = environ.get("NETRC", "")
    path = Path(place).expanduser() if place else Path("~/.netrc").expanduser()
    try:
        found = netrc.netrc(path).authenticators(host)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError, netrc.NetrcParseError) as error:
        # The exception's message contains the malformed word, which may be a password.
        _log.warning("`%s` is not read: %s", path, type(error).__name__)
        return None
    return (found[0], found[2] or "") if found else None


class LoginHandler(urllib.request.BaseHandler):
    """Adds to each request the credentials for the request's server, also after a redirection."""

    handler_order = 400  # runs before the connection is opened

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        """Add the header with the credentials."""
        login = find_login(request.full_url, os.environ)
        if login is not None:
            text = base64.b64encode(":".join(login).encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {text}")
        return request

    https_request = http_request
