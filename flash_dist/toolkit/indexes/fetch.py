"""Fetches pages and files over http and https, with limits on their size and on time."""

from __future__ import annotations

import http.client
import logging
import re
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, Protocol
from urllib.parse import unquote, urlsplit

from ..errors import FetchError
from ..product import NAME
from ..targets.wording import read_whole
from .credentials import LoginHandler, without_credentials
from .patience import Patience, make_handlers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Progress = Callable[[int, int | None], None]  # bytes so far, and in total if known

SCHEMES: Final = ("http", "https", "file")
MAX_PAGE_BYTES: Final = 64 << 20
MAX_FILE_BYTES: Final = 4 << 30
TIMEOUT: Final = 30.0  # seconds without a byte

_log: Final = logging.getLogger(__name__)

_URL = re.compile(r"([a-z][a-z0-9+.-]+)://", re.IGNORECASE)
_CHUNK = 1 << 16
_PAGE_TYPES = ("text/html", "application/xhtml", "application/vnd.pypi.simple")
_ACCEPT = (
    "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, "
    "text/html;q=0.1, */*;q=0.01"
)
_BROKEN = (OSError, http.client.HTTPException, ValueError)  # URLError is an OSError


class Response(Protocol):
    """A server's response, open while it is read."""

    url: str  # after redirections

    def read(self, size: int) -> bytes:
        """Return at most `size` of the next bytes."""

    @property
    def headers(self) -> http.client.HTTPMessage:
        """The headers of the response."""


def is_url(text: str) -> bool:
    """Tell if a text is an address rather than a path."""
    return _URL.match(text) is not None


def last_part(url: str) -> str:
    """Return the last part of an address's path, decoded."""
    return unquote(urlsplit(url).path).rstrip("/").rpartition("/")[2]


def local_path(url: str) -> Path | None:
    """Return the path of a `file:` address; None for another address.

    Raises:
        FetchError: The address names a host other than localhost, or contains a NUL.
    """
    if not url.lower().startswith("file:"):
        return None
    parts = urlsplit(url)
    path = unquote(parts.path)
    if "\0" in path:
        message = f"a file: address names a file, got `{url}` with a NUL in it"
        raise FetchError(message, hint="name the file by its path")
    if parts.netloc not in {"", "localhost"}:
        message = f"a file: address has no host, got `{url}`"
        raise FetchError(message, hint=f"`file://{parts.path}` is a file of this machine")
    return Path(path)


def is_page(response: Response) -> bool:
    """Tell if a response is a page, such as an index, rather than a file."""
    return str(response.headers.get("Content-Type", "")).lower().startswith(_PAGE_TYPES)


@contextmanager
def open_url(
    url: str, *, method: str = "GET", patience: Patience | None = None
) -> Iterator[Response]:
    """Send a request to a server, and yield its open response.

    Args:
        url: The address.
        method: The HTTP method.
        patience: Time limit for the whole request. None: the limit for pages.

    Raises:
        FetchError: The address is not http or https, or the request fails.
    """
    url = without_credentials(url)
    match = _URL.match(url)
    scheme = match[1].lower() if match else ""
    if scheme not in SCHEMES:
        message = f"an address is http, https or file, got `{url}`"
        raise FetchError(message, hint="name a file or folder by its path")
    _log.debug("%s %s", method, url)
    patience = patience or Patience()
    try:
        request = urllib.request.Request(  # noqa: S310 - the scheme was checked
            url, headers={"Accept": _ACCEPT, "User-Agent": NAME}, method=method
        )
        with (
            patience.watching(),
            _make_opener(patience).open(request, timeout=TIMEOUT) as response,
        ):
            yield response
    except (FetchError, *_BROKEN) as error:
        if patience.ended:
            raise _too_slow(url, patience) from error
        if isinstance(error, FetchError):
            raise
        raise _explain(url, error) from error
    if patience.ended:
        raise _too_slow(url, patience)


def _too_slow(url: str, patience: Patience) -> FetchError:
    message = f"cannot fetch `{url}`: it is not done after {patience.seconds:.0f} seconds"
    return FetchError(message, hint="download it and name the file, or try again later")


def _make_opener(patience: Patience) -> urllib.request.OpenerDirector:
    """Return an opener that opens only http and https addresses, even after a redirection."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        *make_handlers(patience),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
        LoginHandler(),
    ):
        opener.add_handler(handler)
    return opener


def _explain(url: str, error: Exception) -> FetchError:
    if isinstance(error, urllib.error.HTTPError):
        reason: object = f"HTTP {error.code} {error.reason}"
        error.close()  # an HTTPError is also an open response
    else:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
    message = f"cannot fetch `{url}`: {reason or type(error).__name__}"
    return FetchError(message, hint="check the address, or download it and name the file")


def read_page(response: Response) -> str:
    """Return a page as text.

    Raises:
        FetchError: The page is larger than MAX_PAGE_BYTES, or ends too soon.
    """
    text = b"".join(_chunks(response, MAX_PAGE_BYTES)).decode("utf-8", "replace")
    return text.removeprefix("\ufeff")


def save(
    response: Response,
    file: IO[bytes],
    *,
    progress: Progress,
    limit: int = MAX_FILE_BYTES,
    patience: Patience | None = None,
) -> None:
    """Write a response to a file. If `patience` has a rate, received bytes extend the deadline.

    Raises:
        FetchError: The response is larger than the limit, or ends too soon.
    """
    length = content_length(response)
    if length is not None and length > limit:
        raise _too_large(response.url, limit)
    done = 0
    for chunk in _chunks(response, limit, patience):
        file.write(chunk)
        done += len(chunk)
        progress(done, length)


def content_length(response: Response) -> int | None:
    """Return the number of bytes that a server announces; None if it announces none."""
    text = str(response.headers.get("Content-Length", ""))
    return read_whole(text)


def _chunks(response: Response, limit: int, patience: Patience | None = None) -> Iterator[bytes]:
    """Yield the response in chunks. Check its length, because `read` ignores an early end."""
    done, length = 0, content_length(response)
    while chunk := response.read(_CHUNK):
        done += len(chunk)
        if patience is not None:
            patience.count(len(chunk))
        if done > limit:
            raise _too_large(response.url, limit)
        yield chunk
    if length is not None and done != length:
        message = f"cannot fetch `{response.url}`: {done} of {length} bytes came"
        raise FetchError(message, hint="try again")


def _too_large(url: str, limit: int) -> FetchError:
    message = f"cannot fetch `{url}`: it is larger than {limit} bytes"
    return FetchError(message, hint="download it and name the file")
