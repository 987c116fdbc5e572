"""Checkpoints on disk: what is in one, and how it gets there whole or not at all."""
