"""What a report that leaves this machine does not tell: who, on which host, with which secrets."""

from __future__ import annotations

import getpass
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

# Names that tell nothing of anybody, and would garble the words that they are part of.
COMMON_USERS: Final = frozenset({
    "root", "user", "users", "admin", "ubuntu", "debian", "rocky", "linux", "docker", "container",
    "nvidia", "cuda", "torch", "python", "gpu", "driver", "test", "runner", "build", "install",
    "nobody", "home", "system", "kernel", "kernels",
})  # fmt: skip
COMMON_HOSTS: Final = frozenset({*COMMON_USERS, "localhost", "localdomain", "buildkitsandbox"})

_HOMES: Final = re.compile(r"(/home/|/Users/|[A-Za-z]:\\Users\\)(?!<)[^/\\\s:'\"`,;)]+")
_CREDENTIALS: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^/\s'\"`]*@", re.IGNORECASE)
_QUERY: Final = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s?#'\"`]+)[?#][^\s'\"`]+", re.IGNORECASE)
_DEVICE_ID: Final = re.compile(r"\b((?:GPU|MIG)-[0-9a-f]{8})-[0-9a-f-]{20,}", re.IGNORECASE)


@dataclass(frozen=True)
class Redaction:
    """What to leave out: the home folder becomes `~`, names become what they are names of."""

    homes: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()

    def text(self, text: str) -> str:
        """Return a text without what is to be left out."""
        for home in sorted(self.homes, key=len, reverse=True):
            text = re.sub(rf"{re.escape(home)}(?!\w|[.-]\w)", "~", text)
        text = _CREDENTIALS.sub(r"\1", text)
        text = _QUERY.sub(r"\1", text)
        text = _DEVICE_ID.sub(r"\1", text)
        text = _HOMES.sub(r"\1<user>", text)
        text = _replace_words(text, self.hosts, "<host>")
        return _replace_words(text, self.users, "<user>")

    def data(self, value: Any) -> Any:  # noqa: ANN401 - plain data of any shape
        """Return plain data whose texts, keys included, are without it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(key)): self.data(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.data(one) for one in value]
        return value


def _replace_words(text: str, words: tuple[str, ...], instead: str) -> str:
    for word in sorted(words, key=len, reverse=True):
        text = re.sub(rf"(?<![\w<]){re.escape(word)}(?![\w>])", instead, text, flags=re.IGNORECASE)
    return text


def redaction_of_this_machine() -> Redaction:
    """Read who runs this, and where."""
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
    except (ImportError, KeyError, OSError):  # which one depends on the version of Python
        return []
