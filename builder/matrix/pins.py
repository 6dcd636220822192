"""pins.yaml as typed models: the date of each pin, and the versions of programs with known vulnerabilities."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Annotated

from packaging.version import Version
from pydantic import Field, StringConstraints

from builder.common import validation
from builder.matrix.facts import Line, Release
from builder.matrix.schema import StrictModel

FILE = Path(__file__).with_name("pins.yaml")


Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9./:-]{0,100}$")]
PinnedVersion = Annotated[str, StringConstraints(pattern=r"^(v?[0-9]+(\.[0-9]+)*|sha256:[0-9a-f]{64}|)$")]


class Pin(StrictModel):
    """A pinned version. Maintainers look for a newer one `days` days after `released`.

    `version` is empty for a file with the versions of many packages.
    """

    version: PinnedVersion = ""
    released: date = Field(alias="date")
    days: int = Field(gt=0)


class Vulnerability(StrictModel):
    """`fixed` are the first releases without it, one for each major version."""

    id: Line
    fixed: Annotated[tuple[Release, ...], Field(min_length=1, strict=False)]
    risk: Line
    source: Line

    def affects(self, version: str) -> bool:
        """True if a release has it. A major version without a fixed release has it if it is older than all of them."""
        number, fixed = Version(version), sorted(map(Version, self.fixed))
        return number < next((first for first in fixed if first.major == number.major), fixed[0])


class Pins(StrictModel):
    pins: dict[Name, Pin]
    vulnerable: dict[Name, Annotated[tuple[Vulnerability, ...], Field(strict=False)]]

    def vulnerabilities(self, program: str, version: str) -> list[Vulnerability]:
        """The vulnerabilities of a release of a program."""
        return [each for each in self.vulnerable.get(program, ()) if each.affects(version)]

    def safe_releases(self, program: str) -> list[str]:
        """The first release of each major version without any of the vulnerabilities, the oldest first."""
        fixed: dict[int, Version] = {}
        for number in (Version(text) for each in self.vulnerable.get(program, ()) for text in each.fixed):
            fixed[number.major] = max(number, fixed.get(number.major, number))
        return [str(number) for number in sorted(fixed.values())]


def describe(vulnerabilities: Sequence[Vulnerability]) -> str:
    return "; ".join(f"{each.id} ({each.risk})" for each in vulnerabilities)


@cache
def load_pins() -> Pins:
    """The pins of this program's repository."""
    return validation.read_model(FILE, Pins)
