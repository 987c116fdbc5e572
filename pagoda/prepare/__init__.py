"""Prepares a model for pages: checks, tiles, micro-batches, experts one by one, losses in pieces; then its units."""
