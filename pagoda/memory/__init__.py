"""Where bytes live: pages, the pools that hand them out, and the tiers that hold them.

Knows nothing of modules, plans or optimizers. The nouns, from small to large:

`Run` (consecutive pages) · `PagePool` (which are free) · `Arena` (the bytes of a RAM tier) · `Region` (pages of an
arena) · `Scratch` (pages for one step) · `PageFile` and `StripedFile` (the bytes of an SSD tier) · `SlotTable` (which
of them hold which page) · `PageStore` (what is on disk, and stays) · `SSDTier` (pages over all that) · `PageSnapshot`
and `CommittedPages` (pages of an SSD tier as they were).
"""
