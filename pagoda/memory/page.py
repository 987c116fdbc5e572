"""Pages, the unit of allocation and transfer, and runs of consecutive pages."""

from dataclasses import dataclass

PAGE_BYTES = 4 * 1024 * 1024
"""Default page size, in bytes: large enough that two threads of direct I/O reach the disk's limit."""

PAGE_ALIGN = 4096
"""The alignment in bytes that direct I/O requires of every address, file offset and length. Page sizes are multiples of
it."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive frames of a memory, or pages of an SSD tier, `[start, stop)`."""

    start: int
    """Index of the first frame."""
    count: int
    """The number of frames. 0 only for the run of a state without elements."""

    @property
    def stop(self) -> int:
        """Index one past the last frame."""
        return self.start + self.count

    def part(self, offset_bytes: int, nbytes: int, page_bytes: int) -> "PageRun":
        """The pages of a range of the run's bytes, which begins with a page and may end inside one.

        Raises ValueError unless the range is in this run, and whole blocks for direct I/O.
        """
        first, odd = divmod(offset_bytes, page_bytes)
        count = -(-nbytes // page_bytes)
        if odd or nbytes % PAGE_ALIGN or first < 0 or first + count > self.count:
            raise ValueError(
                f"cannot transfer {nbytes} bytes at offset {offset_bytes} of {self}: only whole pages of {page_bytes} "
                f"bytes in it can be transferred, and of the last one, multiples of {PAGE_ALIGN} bytes"
            )
        return PageRun(self.start + first, count)


def pages_for(nbytes: int, page_bytes: int) -> int:
    """The number of pages of `page_bytes` that hold `nbytes`, rounded up. 0 for 0 bytes.

    Raises ValueError if `nbytes` is negative or `page_bytes` is below 1.
    """
    if nbytes < 0 or page_bytes < 1:
        raise ValueError(f"cannot hold {nbytes} bytes in pages of {page_bytes} bytes")
    return -(-nbytes // page_bytes)
