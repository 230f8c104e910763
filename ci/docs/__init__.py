"""Build the documentation, an HTML site that needs no network: `python -m ci.docs dist/docs`.

The pages are docs/*.md, the other Markdown files such as README.md, and generated pages: the
docstrings of the public names, the help of every subcommand, the findings, the exit statuses and
the schemas. The build fails at a warning of Sphinx, a broken link, a file loaded from the network,
or a page that is wider than its window.
"""
