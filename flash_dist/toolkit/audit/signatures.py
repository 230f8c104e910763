"""Verifies the signatures of a release: on its manifest, and on the provenance of each file.

Signatures are in DSSE envelopes: `manifest.dsse.json` next to `manifest.json`, and for each file X
`X.intoto.dsse.json` next to `X.intoto.json`, the statement of its provenance. An envelope must hold
exactly the bytes of the file next to it. The checks fail closed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..binaries.files import hash_file, open_file
from ..binaries.json_text import parse_json
from ..builds.listing import make_listing, read_listing
from ..errors import KernelsError
from ..findings.result import CheckResult
from ..findings.verifications import (
    VERIFY_KEY_EXPIRED,
    VERIFY_MIXED_RELEASE,
    VERIFY_PROVENANCE,
    VERIFY_SIGNATURE,
    VERIFY_UNSIGNED,
)
from ..product import package_of
from ..targets.wording import few_lines
from .public_keys import KIND, require_extra, today

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from datetime import date

    from ..builds.listing import Listing
    from ..findings.entry import Entry
    from .public_keys import PublicKey

MANIFEST_TYPE: Final = "application/vnd.fatwheel.manifest+json"
STATEMENT_TYPE: Final = "application/vnd.in-toto+json"
PREDICATE_TYPE: Final = "https://slsa.dev/provenance/v1"
PROVENANCE: Final = "provenance"  # folder of the statements, unless they are next to the manifest
STATEMENT: Final = ".intoto.json"
# Names of the files of a release; the first group is the project.
_FILE: Final = re.compile(r"(.+?)(-[0-9].*)?\.(whl|conda|tar\.gz|pyz)")
_SHOWN: Final = 10  # maximum files named in a message
_LONGEST: Final = 300  # maximum characters of a message
_AGAIN: Final = "do not install it; download the files of one release again, from its publisher"


class UnprovenError(KernelsError):
    """The signatures do not prove that a file comes from the holder of a key."""

    def __init__(self, entry: Entry, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message, hint=_AGAIN)
        self.entry = entry
        self.details = tuple(details)

    def to_result(self) -> CheckResult:
        """Return the failed check."""
        return CheckResult("fail", self.message, self.details, self.hint or "", self.entry)


def envelope_of(path: Path) -> Path:
    """Return the path of the envelope next to a signed file."""
    return path.with_name(f"{path.name.removesuffix('.json')}.dsse.json")


def read_signed(path: Path, kind: str, keys: Sequence[PublicKey], day: date) -> tuple[Any, str]:
    """Read a signed file.

    Args:
        path: A JSON file, with its envelope next to it.
        kind: The payload type of its envelope.
        keys: The keys that may have signed the file.
        day: The day on which a key must be valid. A key is valid until the end of its last day.

    Returns:
        The data in the file, and the name of the key that signed it.

    Raises:
        UnprovenError: The file or its envelope cannot be read, no valid key signed the file, or the
            file differs from its envelope or is not JSON.
    """
    text = _read(path)
    envelope = _read_envelope(envelope_of(path), kind)
    if envelope.payload != text:
        message = f"`{path.name}` was changed: other bytes are signed in `{envelope_of(path).name}`"
        raise UnprovenError(VERIFY_SIGNATURE, message)
    signers = [key for key in keys if _has_signed(key, envelope)]
    good = [key for key in signers if day <= key.expires]
    if good:
        return _parse(path, text), good[0].name
    given = ", ".join(key.name for key in keys)
    if signers:
        message = f"the key of `{path.name}` has expired, today is {day}: {signers[0].name}"
        raise UnprovenError(VERIFY_KEY_EXPIRED, message, (f"keys given: {given}",))
    claimed = ", ".join(str(one)[:12] for one in envelope.signatures) or "nobody"
    message = f"`{path.name}` is not signed by a key that was given"
    details = (f"keys given: {given}", f"the envelope names {claimed:.200}")
    raise UnprovenError(VERIFY_SIGNATURE, message, details)


def _read(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except KernelsError as error:
        raise UnprovenError(VERIFY_UNSIGNED, error.message) from error


def _read_envelope(path: Path, kind: str) -> Any:  # noqa: ANN401 - from an optional package
    from securesystemslib.dsse import Envelope  # noqa: PLC0415 - an optional package
    from securesystemslib.exceptions import Error  # noqa: PLC0415

    if not path.exists():
        signed = path.name.replace(".dsse.json", ".json")
        raise UnprovenError(VERIFY_UNSIGNED, f"`{signed}` is not signed: there is no `{path}`")
    try:
        envelope = Envelope.from_dict(parse_json(_read(path)))
        told = str(envelope.payload_type)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError, Error) as error:
        message = f"`{path.name}` is no DSSE envelope: {type(error).__name__} {error}"[:_LONGEST]
        raise UnprovenError(VERIFY_SIGNATURE, message) from error
    if told != kind:
        message = f"`{path.name}` is an envelope of {told:.100}, expected {kind}"
        raise UnprovenError(VERIFY_SIGNATURE, message)
    return envelope


def _has_signed(key: PublicKey, envelope: Any) -> bool:  # noqa: ANN401 - from an optional package
    from securesystemslib.exceptions import Error  # noqa: PLC0415 - an optional package
    from securesystemslib.signer import SSlibKey  # noqa: PLC0415

    try:
        envelope.verify([SSlibKey(key.keyid, KIND, KIND, {"public": key.public})], 1)
    except (Error, TypeError, ValueError):
        return False
    return True


def _parse(path: Path, text: bytes) -> Any:  # noqa: ANN401 - any JSON
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        message = f"`{path.name}` is not JSON: {error}"[:_LONGEST]
        raise UnprovenError(VERIFY_SIGNATURE, message) from error


@dataclass(frozen=True)
class SignedRelease:
    """A manifest, the result of checking its signature, and the keys that may have signed.

    Args:
        listing: The files of the release.
        keys: The keys that may have signed.
        day: The day on which a key must be valid.
        signature: Result of the check of the manifest itself.
        project: The project that the manifest names; empty if its signature is not valid.
        commit: The commit that the manifest names; None if its signature is not valid.
    """

    listing: Listing
    keys: tuple[PublicKey, ...]
    day: date
    signature: CheckResult
    project: str = ""
    commit: str | None = None
    _strangers: dict[Path, tuple[tuple[Path, str], ...]] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the manifest."""
        return Path(self.listing.source).parent

    def check(self, path: Path, sha256: str) -> tuple[CheckResult, ...]:
        """Check one file of the release: signature, provenance and the files next to it.

        If the manifest has no valid signature, return only that failure.

        Args:
            path: The file.
            sha256: Hash of the file's bytes.
        """
        if not self.signature:
            return (self.signature,)
        provenance = replace(self._check_provenance(path.name, sha256), name="provenance")
        return (self.signature, provenance, replace(self._check_release(path), name="release"))

    def _check_provenance(self, name: str, sha256: str) -> CheckResult:
        """Check that a signed statement names the file, and the commit of the manifest."""
        places = [self.folder / PROVENANCE, self.folder]
        named = [place / f"{name}{STATEMENT}" for place in places]
        path = next(filter(Path.is_file, named), None)
        if path is None:
            message = f"there is no statement of provenance: `{named[0]}` is missing"
            return UnprovenError(VERIFY_PROVENANCE, message).to_result()
        try:
            data, key = read_signed(path, STATEMENT_TYPE, self.keys, self.day)
            commit = _read_statement(data, {"name": name, "digest": {"sha256": sha256}})
        except UnprovenError as error:
            return error.to_result()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            message = f"`{path.name}` is not the statement of this file"
            details = (f"{type(error).__name__} {error}"[:_LONGEST],)
            return UnprovenError(VERIFY_PROVENANCE, message, details).to_result()
        if commit != self.commit:
            message = f"`{path.name}` is of commit {commit}, the manifest of {self.commit}"
            return UnprovenError(VERIFY_MIXED_RELEASE, message).to_result()
        return CheckResult("ok", f"made of commit {str(commit)[:12]}, says key {key}")

    def _check_release(self, path: Path) -> CheckResult:
        """Check that no file of another release is next to the file, manifest or statements."""
        places = (path.parent, self.folder, self.folder / PROVENANCE)
        folders = dict.fromkeys(place.resolve() for place in places if place.is_dir())
        found = [one for folder in folders for one in self._find_strangers(folder)]
        problems = [sentence for place, sentence in found if place != path.resolve()]
        if problems:
            message = "files beside it are not of this release"
            details = few_lines(problems, _SHOWN)
            return UnprovenError(VERIFY_MIXED_RELEASE, message, details).to_result()
        return CheckResult("ok", "no file of another release lies beside it")

    def _find_strangers(self, folder: Path) -> tuple[tuple[Path, str], ...]:
        if folder not in self._strangers:
            found = _find_strangers(folder, self.listing, self.project)
            self._strangers[folder] = tuple(found)
        return self._strangers[folder]


def read_release(
    manifest: Path, keys: Sequence[PublicKey], day: date | None = None
) -> SignedRelease:
    """Read a manifest, and check its signature.

    An invalid signature does not raise: it is the failed check `signature` of the result.

    Args:
        manifest: The file.
        keys: The keys that may have signed the manifest.
        day: The day on which a key must be valid; by default today.

    Raises:
        MissingExtraError: The library that verifies signatures is not installed.
        ManifestError: The manifest is absent or malformed.
    """
    require_extra()
    listing, day = read_listing(manifest), day or today()
    try:
        data, key = read_signed(manifest, MANIFEST_TYPE, keys, day)
    except UnprovenError as error:
        result = replace(error.to_result(), name="signature")
        return SignedRelease(listing, tuple(keys), day, result)
    signature = CheckResult("ok", f"the manifest is signed by key {key}", name="signature")
    told = (package_of(str(data.get("project"))), data.get("source_commit"))
    listing = make_listing(manifest, data)  # parsed from the bytes whose signature was checked
    return SignedRelease(listing, tuple(keys), day, signature, *told)


def _read_statement(data: Any, subject: Mapping[str, Any]) -> str:  # noqa: ANN401 - any JSON
    """Check that a statement is about this file alone, and return the commit that it names."""
    told = (data["predicateType"], data["subject"])
    if told != (PREDICATE_TYPE, [subject]):
        message = f"it is of the kind {told[0]} and about {told[1]}"
        raise ValueError(message)
    made_of = data["predicate"]["buildDefinition"]["resolvedDependencies"]
    (commit,) = (one["digest"]["gitCommit"] for one in made_of if one["name"] == "source")
    return str(commit)


def _find_strangers(folder: Path, listing: Listing, project: str) -> Iterator[tuple[Path, str]]:
    """Yield files that differ from the listing, and files of the project that are not listed.

    Yields:
        The path of each file, and a sentence that says how it differs.
    """
    for path in sorted(folder.iterdir()):
        listed = listing.files.get(path.name)
        about = path.name.partition(".intoto.")[0]
        if listed is None and about not in listing.files and _project_of(about) == project:
            yield path, f"{path.name} is not listed"
        elif listed is not None and _hash(path) != listed.sha256:
            yield path, f"{path.name} is not the file that is listed"


def _hash(path: Path) -> str:
    """Return the SHA-256 of a file; an empty text if it cannot be read."""
    try:
        with open_file(path) as file:
            return hash_file(file).hex()
    except KernelsError:
        return ""


def _project_of(name: str) -> str:
    """Return the project that a file name begins with; an empty text for other kinds of files."""
    match = _FILE.fullmatch(name)
    return package_of(match[1]) if match else ""
