"""Mixtures of experts: modules that run some of their experts in each forward, and ranks that divide the experts."""
