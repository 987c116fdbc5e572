"""Measures: what this machine does, and how long a model's compute takes on it."""
