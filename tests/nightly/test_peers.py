"""Test suites of transformers, PEFT, TRL and Accelerate pass with our classes, but for listed differences."""

import pytest

from nightly import peers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(5400)]


@pytest.mark.parametrize("name", peers.SUITES)
def test_a_suite_passes_with_our_classes_but_for_listed_differences(name: str) -> None:
    try:
        peers.sources(name)
    except peers.UnavailableError as error:
        pytest.skip(str(error))
    count, _, wrong = peers.compared(name)
    if not count:
        pytest.skip("no test of it passes here as it is, without Pagoda")
    assert not wrong, "\n".join(wrong)
