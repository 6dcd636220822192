"""The packages that changed between locks."""

from __future__ import annotations

from dataclasses import replace

from builder.lock import diff
from tests.fakes.locks import entry

CUDA, EMBER, PIP = entry("nvidia-sums", "12.1", 2), entry("ember", "1.10.0", 3), entry("pip", "25.0", 1)
NEWER = entry("ember", "1.11.0", 3)


def test_each_package_that_differs_has_a_line() -> None:
    other_file, come = replace(PIP, sha256="5" * 64), entry("come", "2", 4)
    assert diff.package_changes([CUDA, EMBER, PIP], [come, other_file, NEWER]) == [
        "come none -> 2",
        "ember 1.10.0 -> 1.11.0",
        "nvidia-sums 12.1 -> none",
        "pip 25.0 (another file)",
    ]
    assert diff.package_changes([CUDA, EMBER], [EMBER, CUDA]) == []


def test_a_change_of_several_locks_is_one_line() -> None:
    old = {name: [EMBER] for name in "bcde"} | {"same": [CUDA]}
    new = {name: [NEWER] for name in "bcde"} | {"same": [CUDA], "x": [CUDA, PIP]}
    assert diff.lock_changes(old, new) == [
        "x: new, 2 packages",
        "ember 1.10.0 -> 1.11.0 (b, c, d and 1 more)",
    ]
