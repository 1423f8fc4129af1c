"""Tool calls and reasoning in a model's text: parsers by format, and the grammars that force a call."""
