"""The base image: present, pulled or put together, and what is said when none of it works."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder import base
from builder.errors import DiskError, EngineError
from builder.host import AptSource, Host
from builder.project import Project
from tests.unit.fakes import FakeEngine, Programs

IMAGE = f"example/base:new@sha256:{'2' * 64}"
LOCAL = "debian:newbird (made by mmdebstrap)"
HOST = Host(
    apt_sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),),
    apt_proxy="http://proxy.example.test:3142",
)


def quiet(_: str) -> None:
    return


Ensure = Callable[..., base.Base]


@pytest.fixture
def ensure(tiny: Project) -> Ensure:
    def call(engine: FakeEngine, *, fresh: bool = False, release: str = "newbird") -> base.Base:
        return base.ensure(engine, tiny, release, HOST, quiet, fresh=fresh)

    return call


@pytest.fixture
def mmdebstrap(monkeypatch: pytest.MonkeyPatch) -> Programs:
    """A machine with mmdebstrap that works."""
    programs = Programs(lambda command: (Path(command[-1]).write_bytes(b"tar") and 0, "", ""))
    monkeypatch.setattr("subprocess.run", programs)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return programs


def test_present(ensure: Ensure) -> None:
    engine = FakeEngine(registry=False)
    engine.have(IMAGE)
    assert ensure(engine) == base.Base(reference=IMAGE, name=IMAGE)
    assert engine.calls == []


def test_pulled(ensure: Ensure) -> None:
    engine = FakeEngine()
    made = ensure(engine)
    assert (made.reference, made.name) == (IMAGE, IMAGE)
    assert engine.calls == [f"pull {IMAGE}"]


def test_put_together_where_no_registry_answers(ensure: Ensure, mmdebstrap: Programs) -> None:
    engine = FakeEngine(registry=False)
    made = ensure(engine)
    assert made.name == LOCAL
    assert made.reference.startswith("gpu-images/base:newbird-")
    assert engine.calls == [f"pull {IMAGE}", f"import {made.reference}"]
    command = mmdebstrap.calls[0]
    assert command[0] == "/bin/mmdebstrap"
    assert command[-2] == "newbird"
    assert '--aptopt=Acquire::http::Proxy "http://proxy.example.test:3142";' in command
    # The mirror is used, and gone from the result.
    assert any(
        word.startswith("--customize-hook=cp ") and word.endswith('"$1/etc/apt/sources.list"') for word in command
    )


def test_what_was_put_together_is_used_again(ensure: Ensure, mmdebstrap: Programs) -> None:
    engine = FakeEngine(registry=False)
    made = ensure(engine)
    engine.calls.clear()
    assert ensure(engine) == made
    assert engine.calls == []
    assert len(mmdebstrap.calls) == 1


def test_fresh_makes_it_again(ensure: Ensure, mmdebstrap: Programs) -> None:
    engine = FakeEngine(registry=False)
    made = ensure(engine)
    assert ensure(engine, fresh=True).reference == made.reference
    assert len(mmdebstrap.calls) == 2


def test_each_release_has_its_own(ensure: Ensure, mmdebstrap: Programs) -> None:
    engine = FakeEngine(registry=False)
    assert ensure(engine).reference != ensure(engine, release="oldbird").reference
    assert [call[-2] for call in mmdebstrap.calls] == ["newbird", "oldbird"]


def test_a_full_disk_is_no_missing_registry(
    ensure: Ensure, monkeypatch: pytest.MonkeyPatch, mmdebstrap: Programs
) -> None:
    def fail(_: str) -> None:
        raise DiskError("the disk of Docker Engine is full")

    engine = FakeEngine()
    monkeypatch.setattr(engine, "pull", fail)
    with pytest.raises(DiskError):
        ensure(engine)
    assert mmdebstrap.calls == []


def test_without_mmdebstrap_and_without_root(ensure: Ensure, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(EngineError) as caught:
        ensure(FakeEngine(registry=False))
    assert str(caught.value) == (
        f"base: cannot be pulled (pulling {IMAGE}: no registry answers) "
        "and mmdebstrap, which would make it, is not installed"
    )
    assert caught.value.hint == "As root on Debian or Ubuntu: apt-get install mmdebstrap"


def test_root_on_debian_installs_mmdebstrap_first(
    ensure: Ensure, monkeypatch: pytest.MonkeyPatch, mmdebstrap: Programs
) -> None:
    def which(name: str) -> str | None:
        installed = any("install" in call for call in mmdebstrap.calls)
        return f"/bin/{name}" if name == "apt-get" or installed else None

    monkeypatch.setattr("shutil.which", which)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    mmdebstrap.answer = lambda command: (0, "", "")
    assert ensure(FakeEngine(registry=False)).name == LOCAL
    assert [call[0] for call in mmdebstrap.calls] == ["apt-get", "apt-get", "/bin/mmdebstrap"]


@pytest.mark.parametrize(
    ("told", "kind", "says"),
    [
        ("E: write: No space left on device", DiskError, "is full"),
        ("E: http://mirror.example.test/debian newbird Release 404", EngineError, "mmdebstrap failed for newbird"),
    ],
)
def test_mmdebstrap_fails(ensure: Ensure, mmdebstrap: Programs, told: str, kind: type[Exception], says: str) -> None:
    mmdebstrap.answer = lambda _: (25, "", "I: begins\n" * 20 + told)
    engine = FakeEngine(registry=False)
    with pytest.raises(kind, match=says) as caught:
        ensure(engine)
    assert "mirror.example.test" not in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 9
    assert not any(call.startswith("import") for call in engine.calls)
    hint = getattr(caught.value, "hint", "")
    assert "builder clean" in hint or "The registry said" in hint
