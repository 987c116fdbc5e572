"""Wrapping a model: its parameters are made, one at a time, where the plan has their homes."""
