"""Pure data in, pure data out: units, placement, the traced step, and what its operations move. No tensors."""
