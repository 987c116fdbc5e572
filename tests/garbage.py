"""Garbage collection in tests: of what a test makes alone, and nothing of earlier tests is left."""

import gc


def only_of_this_test() -> None:
    """Collections from here look at new objects alone: fast for tests that call for them often.

    What earlier tests left is collected first: what is garbage while it is frozen is never collected, and an optimizer
    keeps its threads for as long.
    """
    gc.collect()
    gc.freeze()


def all_of_earlier_tests() -> None:
    """As above; what became garbage only after it was frozen is collected too, which takes a look at all imports."""
    gc.unfreeze()
    only_of_this_test()
