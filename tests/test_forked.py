"""A test that is cut off leaves no process behind."""

import os
import signal
import time

from forked import ended, fork

from pagoda.ranks.transport import lives


def test_a_forked_process_ends_with_the_one_that_has_forked_it() -> None:
    reading, writing = os.pipe()

    def hold() -> None:
        child = fork(lambda: time.sleep(60))
        os.write(writing, str(child).encode())
        time.sleep(60)

    parent = fork(hold)
    child = int(os.read(reading, 20))
    assert lives(child)
    os.kill(parent, signal.SIGKILL)
    assert ended(parent) == -signal.SIGKILL
    deadline = time.monotonic() + 20
    while lives(child):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
    os.close(reading)
    os.close(writing)
