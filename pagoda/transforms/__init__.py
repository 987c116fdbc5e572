"""One module into tiles, batches into micro-batches, adapters."""
