"""How a live model meets its pages: hooks, accesses, gradients of a step, markers, saved tensors."""
