"""An attention backend for SGLang: `--attention-backend flash_dist --page-size 64`.

SGLang runs `register` as a plug-in in each of its processes, through this package's entry point
`sglang.srt.plugins`. The attention of a sequence has the same bits in any batch, in chunks of any
size and after a cached prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from .backend import FlashDistBackend

NAME: Final = "flash_dist"


def register() -> None:
    """Add flash_dist to SGLang's attention backends; a second call changes nothing.

    `--enable-deterministic-inference` accepts this backend, with cached prefixes.
    """
    # SGLang calls this function, so it has already been imported.
    from sglang.srt.arg_groups import choices  # noqa: PLC0415
    from sglang.srt.layers.attention import attention_registry  # noqa: PLC0415

    if NAME in choices.ATTENTION_BACKEND_CHOICES:
        return
    choices.add_attention_backend_choices([NAME])
    choices.add_deterministic_attention_backend_choices([NAME])
    choices.add_radix_supported_deterministic_attention_backend_choices([NAME])
    attention_registry.register_attention_backend(NAME)(_make_backend)


def _make_backend(runner: ModelRunner) -> FlashDistBackend:
    from .backend import FlashDistBackend  # noqa: PLC0415 - imports SGLang's model runner

    return FlashDistBackend(runner)
