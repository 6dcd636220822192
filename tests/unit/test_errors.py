"""Exit codes: one for each kind of error, and none that a shell or Python gives itself."""

from __future__ import annotations

from builder import errors
from builder.errors import BuilderError


def subclasses(kind: type[BuilderError]) -> set[type[BuilderError]]:
    return {kind}.union(*(subclasses(one) for one in kind.__subclasses__()))


def test_all_lists_every_error() -> None:
    assert set(errors.ALL) == {kind for kind in subclasses(BuilderError) if "exit_code" in vars(kind)}
    assert len(errors.ALL) == len(set(errors.ALL))


def test_exit_codes_are_distinct() -> None:
    codes = [kind.exit_code for kind in errors.ALL]
    assert len(codes) == len(set(codes))
    assert 0 not in codes
    # From 64 on shells, sysexits.h and signals have their own meanings.
    assert all(code < 64 for code in codes)
    assert {errors.INTERRUPTED, errors.TERMINATED} == {130, 143}


def test_every_error_has_words_for_people() -> None:
    assert all(kind.__doc__ and kind.title for kind in errors.ALL)
    assert len({kind.title for kind in errors.ALL}) == len(errors.ALL)


def test_message_and_hint() -> None:
    error = errors.DiskError("it is full", hint="free some")
    assert (str(error), error.hint) == ("it is full", "free some")
    assert errors.DiskError("x").hint == ""
