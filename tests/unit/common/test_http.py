"""What index and registry clients share. Failures and retries: tests/unit/index, tests/unit/registry."""

from __future__ import annotations

import pytest

from builder.common.http import retry_after


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("", 0), ("7", 7), (" 7 ", 7), ("-7", 0), ("soon", 0), ("9" * 12, 0), ("\u0667", 0),
        ("Thu, 01 Jan 1970 00:01:40 GMT", 60), ("Thu, 01 Jan 1970 00:00:01 GMT", 0), ("Thu, 99 Jan 1970", 0),
    ],
)  # fmt: skip
def test_retry_after(header: str, seconds: float) -> None:
    assert retry_after(header, now=40) == seconds
