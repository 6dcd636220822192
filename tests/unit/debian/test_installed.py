"""The Debian packages in dpkg's status file."""

from __future__ import annotations

from builder.debian.control_files import installed_packages

STATUS = b"""Package: bash
Status: install ok installed
Source: bash (5.2.15-2)
Version: 5.2.15-2+b8
Description: a shell
 Version: not a field

Package: gone
Status: deinstall ok config-files
Version: 1

Package: tini
Status: install ok installed
Version: 0.19.0-1
"""


def test_installed_packages_have_a_source() -> None:
    assert installed_packages(STATUS) == {
        ("bash", "5.2.15-2+b8", ("bash", "5.2.15-2")),
        ("tini", "0.19.0-1", ("tini", "0.19.0-1")),
    }
