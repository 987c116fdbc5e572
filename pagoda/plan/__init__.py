"""Pure data in, pure data out: units, placement, the traced step, and the ops each lane runs. No tensors."""
