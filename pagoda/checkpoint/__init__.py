"""The door to state besides the live parameters: state dicts, `gathered`, checkpoints that are whole or absent."""
