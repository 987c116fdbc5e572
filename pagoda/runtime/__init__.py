"""Runs the steps of a plan on a live model."""
