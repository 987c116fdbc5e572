"""Mixtures of experts: modules of which each forward runs some, and ranks that divide them."""
