"""The unit of allocation and movement, and consecutive stretches of it."""

from dataclasses import dataclass

PAGE_BYTES = 4 * 1024 * 1024
"""Default page size, in bytes: large enough that two threads of direct I/O reach the disk's limit."""

PAGE_ALIGN = 4096
"""What direct I/O asks of every address, file offset and length, in bytes. Page sizes are multiples of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """The consecutive frames (of a memory) or slots (of a file) `[start, stop)`, counted in pages."""

    start: int
    """Index of the first frame."""
    count: int
    """How many frames; at least 1."""

    @property
    def stop(self) -> int:
        """Index one past the last frame."""
        return self.start + self.count

    def part(self, offset_bytes: int, nbytes: int, page_bytes: int) -> "Run":
        """The pages of some of its bytes. Raises ValueError unless they are whole pages of this run."""
        first, odd = divmod(offset_bytes, page_bytes)
        count, rest = divmod(nbytes, page_bytes)
        if odd or rest or first < 0 or first + count > self.count:
            raise ValueError(
                f"asked for {nbytes} bytes at offset {offset_bytes} of {self}: only whole pages of {page_bytes} bytes "
                "in it are moved"
            )
        return Run(self.start + first, count)


def pages_for(nbytes: int, page_bytes: int) -> int:
    """How many pages of `page_bytes` hold `nbytes`: rounded up, 0 for 0 bytes.

    Raises ValueError when `nbytes` is negative or `page_bytes` is below 1.
    """
    if nbytes < 0 or page_bytes < 1:
        raise ValueError(f"cannot lay {nbytes} bytes over pages of {page_bytes} bytes")
    return -(-nbytes // page_bytes)
