"""Plans: units, placement, the traced step, and the bytes that operations move. All of it is data without tensors."""
