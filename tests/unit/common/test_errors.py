"""Errors: distinct exit codes, none of them used by shells or Python, and messages."""

from __future__ import annotations

import pytest

from builder.common import errors
from builder.common.errors import BuilderError


def subclasses(kind: type[BuilderError]) -> set[type[BuilderError]]:
    return {kind}.union(*(subclasses(subclass) for subclass in kind.__subclasses__()))


def test_all_lists_every_error() -> None:
    assert set(errors.ALL) == {kind for kind in subclasses(BuilderError) if "exit_code" in vars(kind)}


def test_exit_codes_are_distinct() -> None:
    codes = [kind.exit_code for kind in errors.ALL]
    assert len(codes) == len(set(codes))
    assert 0 not in codes
    # Codes from 64 are those of shells, sysexits.h and signals.
    assert all(code < 64 for code in codes)
    assert {errors.INTERRUPTED, errors.TERMINATED} == {130, 143}


def test_every_error_has_a_title_and_a_description() -> None:
    assert all(kind.__doc__ and kind.title for kind in errors.ALL)
    assert len({kind.title for kind in errors.ALL}) == len(errors.ALL)


def test_several_errors_are_one_of_the_class_of_the_first() -> None:
    error = errors.join([errors.DiskError("full", hint="free some"), errors.FileError("gone")], "disks failed")
    assert isinstance(error, errors.DiskError)
    assert str(error) == "2 disks failed\nfull\n  -> free some\ngone"
    error = errors.join([errors.DiskError(name, hint="free some") for name in ("a", "b")], "disks failed")
    assert (str(error), error.hint) == ("2 disks failed\na\nb", "free some")


def test_a_registry_that_cannot_be_reached_ends_a_collection() -> None:
    """The other inputs would fail in the same way."""
    done: list[int] = []

    def step(number: int) -> None:
        done.append(number)
        if number == 2:
            raise errors.NoRegistryError("connection refused")
        raise errors.VerifyError(f"{number} is another image")

    with pytest.raises(errors.VerifyError, match="2 images failed"):
        errors.collect(step, range(1, 75))
    assert done == [1, 2]


@pytest.mark.parametrize(
    ("word", "known", "text"),
    [
        ("bord", ["board", "jupyter"], "; did you mean 'board'?"),
        ("x", ["board", "jupyter"], "; known: board, jupyter"),
        ("x", [str(number) for number in range(100)], ""),
        ("x", [], ""),
    ],
)
def test_the_nearest_known_name_is_suggested(word: str, known: list[str], text: str) -> None:
    assert errors.did_you_mean(word, known) == text
