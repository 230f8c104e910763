"""An examination as one self-contained page, to attach to a bug report."""

from .page import make_page
from .redaction import Redaction, redaction_of_this_machine

__all__ = ["Redaction", "make_page", "redaction_of_this_machine"]
