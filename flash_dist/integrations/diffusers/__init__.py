"""Run models of diffusers on these kernels: call `register()` once.

Then call `pipe.transformer.set_attention_backend("fdist")`. Importing this module imports neither
torch nor diffusers; `register` does.
"""

from __future__ import annotations

from typing import Any, Final

from ..peers import find_names

NAME: Final = "fdist"  # same name as in transformers

OLDEST: Final = "0.35"

__all__ = ["NAME", "register"]


def register() -> str:
    """Register attention with diffusers, and return its name there.

    Pass the name, `fdist`, to `set_attention_backend` of a model, or to
    `diffusers.attention_backend` for a `with` block. diffusers keeps names in an enum, to which
    this function adds a member. A second call changes nothing.

    Raises:
        FlashDistError: diffusers is not installed, or is too old.
        ExtensionError: The compiled extension does not load.
    """
    known = "AttentionBackendName", "_AttentionBackendRegistry"  # private in diffusers
    module = "diffusers.models.attention_dispatch"
    names, registry = find_names(__name__, module, *known, oldest=OLDEST)
    from .attention import attend  # noqa: PLC0415 - loads torch and the extension

    registry.register(_add_member(names))(attend)
    return NAME


def _add_member(names: Any) -> Any:  # noqa: ANN401 - an enum of strings
    """Return the enum's member for NAME; add it, as a class statement would, if it is missing."""
    member = names._value2member_map_.get(NAME)
    if member is None:
        member = str.__new__(names, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        setattr(names, member._name_, member)  # raises if _member_map_ already has the name
        names._member_names_.append(member._name_)
        names._member_map_[member._name_] = member
        names._value2member_map_[NAME] = member
    return member
