"""Sizes are read as people write them and refused when they mean nothing."""

import pytest
from hypothesis import given, strategies as st

from pagoda.errors import ConfigError
from pagoda.memory.page import pages_for
from pagoda.memory.sizes import format_at_least, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("20GiB", 20 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("4096", 4096),
        (" 3 b ", 3),
        ("1kib", 1024),
        ("2KB", 2000),
        ("8G", 8 * 2**30),
        ("1.5m", 3 * 2**19),
        ("0.5TiB", 2**39),
        (7, 7),
    ],
)
def test_sizes_in_binary_and_decimal_units_and_any_case_are_read_exactly(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "value", ["", "GiB", "20X", "1.5.2GB", "-4KiB", "1e9", "12 parsecs", "0", "0.2B", "٣GiB", 0, -1, True, 2.5, None]
)
def test_what_is_no_size_is_refused_naming_the_setting_and_the_value(value: object) -> None:
    with pytest.raises(ConfigError, match="host") as caught:
        parse_bytes(value, "host")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**20 - 1, "1.00 MiB"),
        (-(2**21), "-2.00 MiB"),
        (5000 * 2**50, "5000.00 PiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_unit_below_1024(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 2**55))
def test_what_is_shown_reads_back_within_its_rounding(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)
    assert nbytes <= parse_bytes(format_at_least(nbytes)) <= 1.011 * nbytes


@given(st.integers(0, 2**40), st.integers(1, 2**24))
def test_pages_for_is_the_least_number_that_holds_the_bytes(nbytes: int, page_bytes: int) -> None:
    pages = pages_for(nbytes, page_bytes)
    assert pages * page_bytes >= nbytes > (pages - 1) * page_bytes
