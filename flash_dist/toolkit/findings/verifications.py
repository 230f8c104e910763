"""Ids of findings of `verify`: differences from the release, and missing or invalid signatures."""

from __future__ import annotations

from typing import Final

from ..product import NAME, PROGRAM
from .entry import Entry

VERIFY_UNREAD: Final = Entry(
    "The wheel cannot be read",
    "A file that cannot be read does not pass: a damaged archive, one with missing files, or one "
    "of another package.",
    f"Download the wheel again. `{PROGRAM} inspect FILE` shows what can be read of it.",
)

VERIFY_NOT_LISTED: Final = Entry(
    "The release does not list this file",
    "The manifest names every file of a release, but none has this name: the wheel is of another "
    "release, was renamed, or was never released.",
    "Use the manifest.json of the release that the wheel belongs to.",
)

VERIFY_CHECKSUM: Final = Entry(
    "The file is not the one that was released",
    "Its SHA-256 or size differs from the manifest's. The download was cut short, or the file was "
    "replaced.",
    "Do not install it. Download it again; if it still differs, tell the publisher of the release.",
)

VERIFY_ARCHIVE: Final = Entry(
    "The archive does not match its list of members",
    "The download was cut short, so the list at the end is missing. Or the zip archive has bytes "
    "before, between or after its members, or the header of a member differs from the list: two "
    "programs would read different contents. Or a member is a link, a device, or has permissions "
    "that no build sets.",
    "Do not install it; download it again. The build of this package makes no such archive.",
)

VERIFY_FOREIGN_FILE: Final = Entry(
    "The wheel has files that do not belong to this package",
    f"A wheel of this package holds the folder `{NAME}` and one dist-info. An installer copies "
    "any other file beside other packages: a `.pth` file runs with every Python, a folder `torch` "
    "replaces torch's files, `*.data` reaches `bin`. Or a file is not listed in `_build.json`, or "
    "a listed one is missing.",
    "Do not install it, and tell whoever gave it to you. `python -m zipfile -l FILE` lists its "
    "files.",
)

VERIFY_METADATA: Final = Entry(
    "File name, METADATA, WHEEL and _build.json disagree",
    "The file name, the dist-info and `_build.json` all give version, tags, Python, requirements "
    "and glibc. They must agree, because installers rely on each of them. An added requirement "
    "would be installed, too.",
    "Do not install it, and do not rename wheels; download it again, or build it again: in a "
    "clone by `nox -s build_wheels`.",
)

VERIFY_PACKAGE: Final = Entry(
    "The conda package says more than follows from its wheel",
    "Clients run scripts, write prefixes into files and install dependencies as `info/` of a "
    "package says. Name, build, dependencies and GPUs of this package follow from its wheel, and "
    "`info/` may say nothing else.",
    "Do not install it; download it again. In a clone `nox -s conda` makes packages of wheels.",
)

VERIFY_RECORD: Final = Entry(
    "Files in the wheel differ from its RECORD",
    "RECORD lists a SHA-256 and a size for every file of a wheel. A file was changed, added or "
    "removed after the wheel was made.",
    "Do not install it; download it again. Do not edit a wheel after the build.",
)

VERIFY_AUDIT: Final = Entry(
    "The code in the wheel differs from its declaration",
    "Kernels, targets or libraries differ from `_build.json` in the wheel; each line names the "
    "finding of the audit.",
    f"`{PROGRAM} audit FILE` lists everything, and `{PROGRAM} explain ID` "
    "says what a finding means. Download it again, or build it again: in a clone by "
    "`nox -s build_wheels`.",
)

VERIFY_SBOM_MISSING: Final = Entry(
    "The wheel has no bill of materials",
    "Every wheel of this package carries one (CycloneDX, in `dist-info/sboms`), which names the "
    "toolkit and the third-party parts of the libraries. This wheel is older than that, or the "
    "file was removed.",
    "Download it again, or build it again: in a clone by `nox -s build_wheels`.",
)

VERIFY_SBOM_DIFFERS: Final = Entry(
    "The bill of materials does not match this wheel",
    "Version, targets, parts or the SHA-256 of a library differ from what the wheel holds: the "
    "bill is of another build, or a library was changed.",
    "Do not install it; download it again, or build it again: in a clone by `nox -s build_wheels`.",
)

VERIFY_UNSIGNED: Final = Entry(
    "The release is not signed",
    "`--key` asks for a proof, and the envelope with the signature (`manifest.dsse.json`, or "
    "`FILE.intoto.dsse.json` of a statement) is missing. The files may be sound, but nobody "
    "vouches for them.",
    "Download manifest.json, provenance/ and their `.dsse.json` again. Without `--key` a file is "
    "only compared with itself and with the manifest.",
)

VERIFY_SIGNATURE: Final = Entry(
    "No given key has signed this",
    "The manifest or a statement was changed after it was signed, the signature is damaged, or it "
    "is of another key than those given.",
    "Do not install it. Get the public key from the publisher; if the key was replaced, give the "
    "new one, too: `--key OLD --key NEW`.",
)

VERIFY_KEY_EXPIRED: Final = Entry(
    "The key has expired",
    "The public key names its last day in the field `expires`. Afterwards it proves nothing, "
    "because whoever finds the private key can date a signature back.",
    "Get the publisher's newest public key. Releases that are still supported are signed again.",
)

VERIFY_PROVENANCE: Final = Entry(
    "No signed statement tells where the file comes from",
    "A release has a statement for every file (in-toto, SLSA provenance), with its SHA-256 and its "
    "commit. It is missing, or it is about another file.",
    "Download provenance/ of the release beside manifest.json again.",
)

VERIFY_MIXED_RELEASE: Final = Entry(
    "Files of several releases are mixed",
    "Beside the file, or beside the manifest, lies a file of the same project that the manifest "
    "does not list, or one with other bytes; or a statement is of another commit.",
    "Put the files of one release into a folder of their own, and verify them there.",
)
