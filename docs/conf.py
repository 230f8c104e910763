"""Settings of Sphinx for the documentation; `ci/docs` collects its sources."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from docutils import nodes
from sphinx.writers.html5 import HTML5Translator

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ON_A_PHONE: Final = 3  # columns
_ON_A_LAPTOP: Final = 8

project = "flash_dist"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"

default_role = "code"  # of docstrings: `name`

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

smartquotes = False  # `--option` is no dash

html_theme = "furo"  # no web fonts, nothing from elsewhere; light and dark
html_title = "flash_dist"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_additional_pages = {"search": "search.html"}  # ours
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
highlight_language = "text"  # what a program printed is no Python
pygments_style = "friendly"
pygments_dark_style = "monokai"

# A button on code, not on the output of programs. It copies commands without prompt and output.
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"
copybutton_prompt_text = "$ "
copybutton_line_continuation_character = "\\"
copybutton_here_doc_delimiter = "EOF"


class Translator(HTML5Translator):
    """Names the column in each cell, for a phone, where the rows of a wide table are lists."""

    def visit_entry(self, node: nodes.entry) -> None:
        """Write what opens a cell."""
        start = len(self.body)
        super().visit_entry(node)
        group = node.parent.parent.parent
        heads = [row for head in group.findall(nodes.thead) for row in head.findall(nodes.row)]
        if heads and isinstance(node.parent.parent, nodes.tbody):
            label = self.attval(heads[-1][node.parent.index(node)].astext())
            self.body[start] = self.body[start].replace("<td", f'<td data-label="{label}"', 1)

    def visit_table(self, node: nodes.table) -> None:
        """Mark a table of more columns than a phone, or a laptop, has room for."""
        columns = len(list(node.findall(nodes.colspec)))
        if columns > _ON_A_PHONE:
            node["classes"].append("many-columns")
        if columns > _ON_A_LAPTOP:
            node["classes"].append("dense")
        super().visit_table(node)


def setup(app: Sphinx) -> None:
    """Use the translator above, and the search of `ci/docs/search.py` instead of Sphinx's."""
    app.set_translator("html", Translator)
    app.connect("builder-inited", _leave_out_search)


def _leave_out_search(app: Sphinx) -> None:
    app.builder.search = False
