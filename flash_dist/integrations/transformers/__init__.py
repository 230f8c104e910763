"""Run models of Hugging Face transformers on these kernels: call `register()` once.

Then call `AutoModelForCausalLM.from_pretrained(name, attn_implementation="fdist")`. Importing this
module imports neither torch nor transformers; `register` does.
"""

from __future__ import annotations

from typing import Final

from ..peers import find_names

# Not `flash_dist`: if a name contains `flash`, transformers assumes the package flash_attn, or a
# copy of it, and looks up the functions of that package.
NAME: Final = "fdist"

OLDEST: Final = "4.57"

__all__ = ["NAME", "register"]


def register() -> str:
    """Register attention and masks with transformers, and return their name there.

    Pass the name, `fdist`, as `attn_implementation` or to `model.set_attn_implementation`. Calling
    this again changes nothing.

    Raises:
        FlashDistError: transformers is not installed, or is too old.
        ExtensionError: The compiled extension does not load.
    """
    interfaces = "AttentionInterface", "AttentionMaskInterface"
    attention, mask = find_names(__name__, "transformers", *interfaces, oldest=OLDEST)
    from .attention import attention_forward  # noqa: PLC0415 - loads torch and the extension
    from .masks import make_mask  # noqa: PLC0415

    attention.register(NAME, attention_forward)
    mask.register(NAME, make_mask)  # otherwise padding would be ignored
    return NAME
