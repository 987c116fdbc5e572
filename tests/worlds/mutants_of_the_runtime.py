"""What mutants of the runtime change: file -> what it breaks -> the text that it changes, and what that becomes."""

RUNTIME: dict[str, dict[str, tuple[str, str]]] = {}
