"""Pages on SSD: the file on each drive, the slots across several drives, the records on disk, and the tier on top."""
