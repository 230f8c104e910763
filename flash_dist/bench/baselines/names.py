"""Names of the baselines, of the passes and of the states of L2."""

from __future__ import annotations

from typing import Final

from ...toolkit.errors import UsageError

OURS: Final = "ours"
DETERMINISTIC: Final = "-deterministic"  # name suffix: deterministic mode of torch or a package
OURS_DETERMINISTIC: Final = OURS + DETERMINISTIC
OWN: Final = (OURS, OURS_DETERMINISTIC)
CUDNN_FLEX: Final = "cudnn-flex"
PACKAGES: Final = ("fa4", "fa3", CUDNN_FLEX)  # their backward has a deterministic option
COPY: Final = "copy"  # no attention: only copies tensors shaped like its inputs and results
PLAIN: Final = "plain"  # ours, without the score modification
PEERS: Final = (
    "sdpa-flash",
    "sdpa-flash-deterministic",
    "sdpa-cudnn",
    "sdpa-efficient",
    "sdpa-efficient-deterministic",
    "fa4",
    "fa4-deterministic",
    "fa3",
    "fa3-deterministic",
    CUDNN_FLEX,
    CUDNN_FLEX + DETERMINISTIC,
    "flex",
    "eager",
    COPY,
    PLAIN,
)
LABELS: Final = {  # shown in column titles
    "sdpa-flash": "FLASH",
    "sdpa-flash-deterministic": "FLASH det.",
    "sdpa-cudnn": "cuDNN",
    "sdpa-efficient": "EFF.",
    "sdpa-efficient-deterministic": "EFF. det.",
    "fa4": "FA4",
    "fa4-deterministic": "FA4 det.",
    "fa3": "FA3",
    "fa3-deterministic": "FA3 det.",
    CUDNN_FLEX: "cuDNN flex",
    CUDNN_FLEX + DETERMINISTIC: "cuDNN flex det.",
    "flex": "Flex",
    OURS_DETERMINISTIC: "ours det.",
}
PASSES: Final = ("forward", "backward", "both", "checkpointed")
TITLES: Final = {
    "forward": "forward",
    "backward": "backward",
    "both": "forward + backward",
    "checkpointed": "forward + backward, activation checkpointing",
}
STATES: Final = ("warm", "cold")


def parse_peers(text: str) -> tuple[str, ...]:
    """Parse a list such as `sdpa-flash,flex`. `flash` and `FLASH` mean `sdpa-flash`.

    `none` is the empty list: only ours is measured.
    """
    if text == "none":
        return ()
    meant = {short.lower(): name for name in PEERS for short in (_short(name), label_of(name))}
    parts = (part.strip() for part in text.split(","))
    return _parse_list(",".join(meant.get(x.lower(), x) for x in parts), PEERS, "peer", "none")


def parse_passes(text: str) -> tuple[str, ...]:
    """Parse a list of passes such as `forward,backward`."""
    return _parse_list(text, PASSES, "phase")


def parse_states(text: str) -> tuple[str, ...]:
    """Parse a list of states of L2 such as `warm,cold`."""
    return _parse_list(text, STATES, "L2 state")


def add_ours(peers: tuple[str, ...]) -> tuple[str, ...]:
    """Return ours and the peers; also ours in deterministic mode if any peer uses that mode."""
    return (*(OWN if any(map(in_deterministic_mode, peers)) else (OURS,)), *peers)


def in_deterministic_mode(name: str) -> bool:
    """Return whether a baseline runs under torch.use_deterministic_algorithms(True)."""
    return name.endswith(DETERMINISTIC) and name.removesuffix(DETERMINISTIC) not in PACKAGES


def label_of(name: str) -> str:
    """Return the short name of a baseline."""
    return LABELS.get(name, name)


def is_deterministic(name: str) -> bool:
    """Return whether the backward of a baseline guarantees the same bits on every run."""
    return name in {OURS, PLAIN, "flex", COPY} or name.endswith(DETERMINISTIC)


def _short(name: str) -> str:
    return name.removeprefix("sdpa-")


def _parse_list(text: str, allowed: tuple[str, ...], what: str, *more: str) -> tuple[str, ...]:
    found = [part.strip() for part in text.split(",")]
    for name in found:
        if name not in allowed:
            message = f"{what} must be one of {', '.join((*allowed, *more))}, got `{name:.60}`"
            raise UsageError(message)
    return tuple(dict.fromkeys(found))
