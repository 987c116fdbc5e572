"""Runs a plan on a live model."""
