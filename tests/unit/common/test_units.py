"""Bytes, seconds and counts as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common import units


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_999, "1.0 MB"),
        (1_499_999, "1.5 MB"),
        (999_999_999, "1.0 GB"),
        (4_100_000_000, "4.1 GB"),
        (12_345_000_000_000, "12345.0 GB"),
    ],
)
def test_a_size_is_printed_in_decimal_units(count: int, text: str) -> None:
    assert units.size(count) == text


@given(st.integers(0, 10**12 - 10**9))
def test_a_size_has_at_most_three_digits_before_the_point(count: int) -> None:
    number, unit = units.size(count).split()
    assert unit in ("B", "kB", "MB", "GB")
    assert float(number) < 1000


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("900MB", 900_000_000),
        ("4.3GB", 4_300_000_000),
        ("0.001MB", 1000),
        ("1.001T", 1_001_000_000_000),
        ("2k", 2000),
        ("7B", 7),
        ("7", 7),
        ("9" * 15, 10**15 - 1),
    ],
)
def test_a_size_is_read_in_decimal_units(text: str, count: int) -> None:
    assert units.parse_size(text) == count


@pytest.mark.parametrize(
    "text", ["", "GB", "-1", "1.5", "1.5B", ".5GB", "40 GB", "40gb", "1GiB", "٣GB", "1GB\n", "9" * 16]
)
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^invalid size .*: use e.g. 40GB$"):
        units.parse_size(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0.0 s"), (3.24, "3.2 s"), (75.4, "75 s"), (120, "2 min 0 s"), (245.9, "4 min 5 s"), (7200, "120 min 0 s")],
)
def test_a_duration_is_printed_in_seconds_or_minutes(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_a_noun_is_in_the_singular_for_one() -> None:
    assert [units.counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]
    assert [units.counted(number, "library", "libraries") for number in (1, 2)] == ["1 library", "2 libraries"]
