"""`doctor --explain`: what an error message about GPU code, or the id of a finding, means."""

from __future__ import annotations

import json

from ..findings import suggest
from ..findings.explain import explain
from ..findings.result import EXIT_FINE, EXIT_NOTHING_CHECKED
from .terminal.results import make_console
from .terminal.text import complain, printable

_SHOWN_MESSAGE = 200


def run_explain(message: str, *, as_json: bool) -> int:
    """Explain a message or an id; one that is not known is nothing that could be checked."""
    explanation = explain(message)
    if explanation is None:
        shown = message if len(message) <= _SHOWN_MESSAGE else f"{message[:_SHOWN_MESSAGE]}..."
        complain(f"this message is not known: {printable(shown)}")
        meant = suggest(message)
        if meant is not None:
            complain(f"\nhint: the id `{meant}` is known")
        return EXIT_NOTHING_CHECKED
    if as_json:
        print(json.dumps(explanation.to_json(), indent=2))
        return EXIT_FINE
    console = make_console()
    console.print(printable(explanation.summary), soft_wrap=True)
    console.print(f"  {explanation.entry.meaning}", soft_wrap=True)
    console.print(f"fix: {explanation.entry.remedy}", soft_wrap=True)
    return EXIT_FINE
