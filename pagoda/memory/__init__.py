"""Where bytes live: pages, the pools that hand them out, and the tiers that hold them.

Knows nothing of modules, plans or optimizers. The nouns, from small to large:

`Run` (consecutive frames) · `PagePool` (which frames are free) · `Arena` (the bytes of a RAM tier) · `PageFile` and
`StripedFile` (the bytes of an SSD tier) · `SlotTable` (which of them hold which page) · `MemoryTier` and `SSDTier`
(a pool over its bytes) · `FrozenPages`, `Fork` and `CommittedPages` (pages of an SSD tier as they were).
"""

from pagoda.memory.arena import FRESH_USE_COUNT, Arena, storage_use_count
from pagoda.memory.page import PAGE_ALIGN, PAGE_BYTES, Run, pages_for
from pagoda.memory.pool import PagePool
from pagoda.memory.sizes import format_bytes, parse_bytes
from pagoda.memory.ssd.committed import CommittedPages, open_commit
from pagoda.memory.ssd.file import PageFile
from pagoda.memory.ssd.forget import forget_commit
from pagoda.memory.ssd.tier import Fork, FrozenPages, SSDTier
from pagoda.memory.tier import MemoryTier, Tier

__all__ = [
    "FRESH_USE_COUNT",
    "PAGE_ALIGN",
    "PAGE_BYTES",
    "Arena",
    "CommittedPages",
    "Fork",
    "FrozenPages",
    "MemoryTier",
    "PageFile",
    "PagePool",
    "Run",
    "SSDTier",
    "Tier",
    "forget_commit",
    "format_bytes",
    "open_commit",
    "pages_for",
    "parse_bytes",
    "storage_use_count",
]
