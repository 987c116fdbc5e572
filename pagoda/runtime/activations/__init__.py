"""What graphs keep between forward and backward: by reference, recomputed, offloaded, divided, and accounted for."""
