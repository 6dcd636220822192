"""The source package of a Debian package, from its field `Source`."""

from __future__ import annotations

import pytest

from builder.debian import control_files


@pytest.mark.parametrize(
    ("field", "source"),
    [
        ("", ("libssl3", "3.0.17-1~deb12u2+b1")),
        ("openssl", ("openssl", "3.0.17-1~deb12u2+b1")),
        ("openssl (3.0.17-1~deb12u2)", ("openssl", "3.0.17-1~deb12u2")),
        ("util-linux (1:2.38.1-5)", ("util-linux", "1:2.38.1-5")),
    ],
)
def test_the_source_has_the_name_and_version_of_the_package_unless_the_field_differs(
    field: str, source: tuple[str, str]
) -> None:
    assert control_files.source_package(field, "libssl3", "3.0.17-1~deb12u2+b1") == source


@pytest.mark.parametrize("field", ["Openssl", "openssl 3.0", "openssl ()", "openssl (3 0)", "openssl\n", "o"])
def test_an_invalid_field_is_an_error(field: str) -> None:
    with pytest.raises(ValueError, match="invalid source package"):
        control_files.source_package(field, "libssl3", "3.0.17")
