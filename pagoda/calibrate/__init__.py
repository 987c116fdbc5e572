"""Measures this machine, and how long a model's compute takes on it."""
