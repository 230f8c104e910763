"""An attention backend for vLLM: `--attention-backend FLASH_DIST`.

vLLM runs `register` as a plug-in in each of its processes, through this package's entry point
`vllm.general_plugins`. The attention of a sequence has the same bits in any batch, in chunks of any
size and on any pages.
"""

from __future__ import annotations

import logging
from typing import Final

from packaging.version import InvalidVersion, Version

NAME: Final = "FLASH_DIST"
_OLDEST: Final = Version("0.32")  # earlier versions lay out the cache differently


def register() -> None:
    """Add FLASH_DIST to vLLM's attention backends; a second call changes nothing.

    An older vLLM gets a warning in its log, and no backend.
    """
    import vllm  # noqa: PLC0415 - already imported by the caller

    if not _is_served(vllm.__version__):
        logging.getLogger("vllm").warning(
            "the attention backend %s needs vLLM %s or newer, this is %s",
            NAME,
            _OLDEST,
            vllm.__version__,
        )
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415

    if NAME not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(NAME, f"{__name__}.backend.FlashDistBackend")


def _is_served(version: str) -> bool:
    try:
        return Version(version).release >= _OLDEST.release
    except InvalidVersion:  # a fork's version: treat it as new enough
        return True
