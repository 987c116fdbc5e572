"""Memory: pages, the pools that allocate them, and the tiers that hold them.

Independent of modules, plans and optimizers. The classes, from small to large:

`PageRun` (consecutive pages) · `PagePool` (which pages are free) · `VersionPool` (which runs hold versions of states) ·
`Arena` (the bytes of a tier in memory) · `Region` (pages of an arena) · `PageFile` (opens, reads and writes a file on
one drive) · `CheckedFile` (such files on several drives, with a hash of each page) · `SlotTable` (which slot holds
which page) · `PageStore` (the files that stay on disk) · `SSDTier` (pages on top of these) · `PageSnapshot` and
`CommittedPages` (earlier content of an SSD tier).
"""
