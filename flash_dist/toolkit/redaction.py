"""Removes user names, host names and secrets from a report that leaves this machine."""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Common names that identify nobody. Replacing them would garble paths and messages.
COMMON_USERS: Final = frozenset({
    "root", "user", "users", "admin", "ubuntu", "debian", "rocky", "linux", "docker", "container",
    "nvidia", "cuda", "torch", "python", "gpu", "driver", "test", "runner", "build", "install",
    "nobody", "home", "system", "kernel", "kernels",
})  # fmt: skip
COMMON_HOSTS: Final = frozenset({*COMMON_USERS, "localhost", "localdomain", "buildkitsandbox"})

_HOMES: Final = re.compile(r"(/home/|/Users/|[A-Za-z]:\\Users\\)(?!<)[^/\\\s:'\"`,;)]+")
# Anything that may be a password counts as one. A password may contain characters that should have
# been encoded: quotes and slashes. A port after `:` is not a password. The pattern is matched
# once after each `://`.
_LOGIN: Final = re.compile(r"[^/]*@|(?!\[)[^/:]*:(?!\d{1,5}(?:[/?#'\"`]|$)).*@")
_QUERY: Final = re.compile(r"([^?#]*)[?#](?:.*[^'\"`])?")
_BARE_LOGIN: Final = re.compile(r"(?<![^\s'\"`(=/\\])[^\s:/@'\"`(=\\]+:[^\s/@]+@(?=[\w[])")
_ENCODED_LOGIN: Final = re.compile(r"(%3A%2F%2F)(?:(?!%2F)[^\s/])*%40", re.IGNORECASE)
_CALLED: Final = "token|secret|passw(?:or)?d|passphrase|api_?key|access_?key|credentials?"
_SECRETS: Final = (
    re.compile(
        rf"((?:{_CALLED})[a-z_]*['\"]?(?:\s*[=:]\s*|\s+(?=\S*\d))['\"]?)[^\s'\"`,;&]+",
        re.IGNORECASE,
    ),
    re.compile(r"(\bauthorization\b['\"]?\s*[=:]?\s*['\"]?(?:\w+\s+)?)[^\s'\"`,;]+", re.IGNORECASE),
    re.compile(r"(\bbearer\s+)[^\s'\"`,;]+", re.IGNORECASE),
    # Prefixes of tokens of GitHub, GitLab, Hugging Face, PyPI and AWS.
    re.compile(
        r"\b(gh[a-z]_|github_pat_|glpat-|hf_(?=[A-Za-z0-9]{20})|pypi-AgE|AKIA)[A-Za-z0-9_-]{12,}"
    ),
)
_DEVICE_ID: Final = re.compile(r"\b((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]{20,}", re.IGNORECASE)


@dataclass(frozen=True)
class Redaction:
    """Replacements: `~` for the home folder, and a placeholder for each name."""

    homes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def text(self, text: str) -> str:
        """Return a text with the replacements made, and without logins, secrets and device ids."""
        for home in sorted(self.homes, key=len, reverse=True):
            text = re.sub(rf"{re.escape(home)}(?!\w|[.-]\w)", "~", text)
        text = re.sub(r"\S+", lambda word: _without_query(without_login(word[0])), text)
        text = _BARE_LOGIN.sub("", _ENCODED_LOGIN.sub(r"\1", text))
        for pattern in _SECRETS:
            text = pattern.sub(r"\1<secret>", text)
        text = _DEVICE_ID.sub(r"\1", text)
        text = _HOMES.sub(r"\1<user>", text)
        text = _replace_words(text, self.hosts, "<host>")
        return _replace_words(text, self.users, "<user>")

    def data(self, value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
        """Return plain data with the replacements made in all texts, including keys."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.data(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(one) for one in value]
        return value


def without_login(word: str) -> str:
    """Return an address, or a text with addresses, without the login before the `@` of a host."""
    scheme, *places = word.split("://")
    return "://".join([scheme, *(place[_end(_LOGIN, place) :] for place in places)])


def _without_query(word: str) -> str:
    scheme, *places = word.split("://")
    for number, place in enumerate(places):
        query = _QUERY.match(place)
        places[number] = query[1] + place[query.end() :] if query else place
    return "://".join([scheme, *places])


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _replace_words(text: str, words: tuple[str, ...], instead: str) -> str:
    for word in sorted(words, key=len, reverse=True):
        text = re.sub(rf"(?<![\w<]){re.escape(word)}(?![\w>])", instead, text, flags=re.IGNORECASE)
    return text


def redaction_of_this_machine() -> Redaction:
    """Return the replacements for the home folder, user and host names of this machine."""
    node = platform.node()
    hosts = {node, node.partition(".")[0]}
    return Redaction(
        homes=tuple(sorted(_read_homes())),
        users=tuple(name for name in _read_users() if name.lower() not in COMMON_USERS),
        hosts=tuple(sorted(name for name in hosts if name and name.lower() not in COMMON_HOSTS)),
    )


def _read_homes() -> set[str]:
    try:
        home = Path.home()
        homes = {str(home), str(home.resolve())}
    except (OSError, RuntimeError):
        return set()
    return {one for one in homes if len(Path(one).parts) > 1}  # not `/`


def _read_users() -> list[str]:
    try:
        return [name for name in (getpass.getuser(),) if name]
    except (ImportError, KeyError, OSError):  # the error's type depends on the version of Python
        return []
