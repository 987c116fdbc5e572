"""Which units fit a room. All of it is pages, by unit."""

from collections.abc import Mapping


def first_that_fit(pages: Mapping[int, int], room: int) -> frozenset[int]:
    """The first units, in the order of `pages`, that fit together; none behind one that does not."""
    chosen = set()
    for unit, needed in pages.items():
        room -= needed
        if room < 0:
            break
        chosen.add(unit)
    return frozenset(chosen)


def beside_copies(
    resident: frozenset[int], moments: Mapping[int, int], copies: Mapping[int, int], room: int
) -> frozenset[int]:
    """The first of `resident` units whose moments fit beside copies of the weights of all others."""
    while resident and sum(moments[u] - copies[u] for u in resident) + sum(copies.values()) > room:
        resident -= {max(resident)}
    return resident


def last_that_fit(
    pages: Mapping[int, tuple[int, int]], room: tuple[int, int]
) -> tuple[frozenset[int], tuple[int, int]]:
    """Units that fit together, in RAM and on SSD, and the pages that they take there.

    The last units come first, because backward has their gradients first. Units that need nothing are none.
    """
    chosen = set()
    ram = ssd = 0
    for unit in sorted(pages, reverse=True):
        in_ram, on_ssd = pages[unit]
        if (in_ram or on_ssd) and ram + in_ram <= room[0] and ssd + on_ssd <= room[1]:
            ram, ssd = ram + in_ram, ssd + on_ssd
            chosen.add(unit)
    return frozenset(chosen), (ram, ssd)
