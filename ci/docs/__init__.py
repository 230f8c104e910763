"""Build the documentation, an HTML site that needs no network: `python -m ci.docs dist/docs`.

The pages are docs/*.md and the other texts of the tree, the docstrings, the help of every
subcommand, the findings, the exit statuses and the schemas. A warning of Sphinx, a broken link, a
file from the network and a page that is wider than its window are errors.
"""
