"""Activations between forward and backward: weights kept by reference, blocks recomputed, storages offloaded or
divided."""
