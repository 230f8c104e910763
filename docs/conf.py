"""How Sphinx makes the documentation; `ci/docs.py` collects what it reads."""

from __future__ import annotations

project = "flash_dist"
extensions = ["myst_parser"]
root_doc = "index"

default_role = "code"  # of docstrings: `name`

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

smartquotes = False  # `--option` is no dash

html_theme = "furo"  # no web fonts, nothing from elsewhere; light and dark
html_title = "flash_dist"
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
pygments_style = "friendly"
pygments_dark_style = "monokai"
