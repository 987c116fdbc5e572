"""What a live model holds in place of its weights: hidden and quantized parameters, and the units they are in."""
