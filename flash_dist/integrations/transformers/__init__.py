"""Hugging Face transformers runs its models on these kernels: `register()`, once, and a name.

`AutoModelForCausalLM.from_pretrained(name, attn_implementation="fdist")` is the second line. Like
the package itself this needs torch and transformers only when `register` is called.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from ...errors import FlashDistError

# Not `flash_dist`: transformers takes every name with `flash` in it for the package flash_attn (or
# a copy of it), whose functions it then looks for itself.
NAME: Final = "fdist"

OLDEST: Final = "4.57"

__all__ = ["NAME", "register"]


def register() -> str:
    """Register attention and masks with transformers, and return the name they have there.

    The name, `fdist`, is what `attn_implementation` takes, and `model.set_attn_implementation`.
    Calling this again changes nothing.

    Raises:
        FlashDistError: transformers is not installed, or is too old.
        ExtensionError: The compiled extension does not load.
    """
    attention, mask = _find_interfaces()
    from .attention import attention_forward  # noqa: PLC0415 - loads torch and the extension
    from .masks import make_mask  # noqa: PLC0415

    attention.register(NAME, attention_forward)
    mask.register(NAME, make_mask)  # without one, padding would be ignored
    return NAME


def _find_interfaces() -> tuple[Any, Any]:
    """Return the classes that transformers looks names up in."""
    try:
        package = import_module("transformers")
    except ImportError as error:
        message = f"`{__name__}` needs transformers, which does not import: {error}"
        raise FlashDistError(message, hint=f'`pip install "transformers>={OLDEST}"`') from error
    try:
        return package.AttentionInterface, package.AttentionMaskInterface
    except (AttributeError, ImportError) as error:
        version = getattr(package, "__version__", "an unknown version")
        message = f"transformers must be at least {OLDEST}, got {version}"
        raise FlashDistError(message, hint=f'`pip install "transformers>={OLDEST}"`') from error
