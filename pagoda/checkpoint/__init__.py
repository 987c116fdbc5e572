"""Access to state other than through live parameters: state dicts, `gathered`, and atomic checkpoints."""
