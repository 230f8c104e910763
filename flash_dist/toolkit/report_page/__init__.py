"""Writes the results of `doctor` as one self-contained page, to attach to a bug report."""

from .page import make_page

__all__ = ["make_page"]
