"""Pages on SSD: the file of a drive, the slots over several, what is kept of them on disk, and the tier above."""
