"""Changes to a model before training: modules in tiles, batches in micro-batches, adapters."""
