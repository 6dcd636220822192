"""The base image: present, pulled or built from Debian packages; and the errors if none of it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.build import base
from builder.build.work import Work
from builder.common.console import View
from builder.common.errors import BuilderError, DiskError, EngineError
from builder.index.host import Apt, AptSource, Host
from builder.matrix.project import Project
from tests.fakes.engine import FakeEngine, MemoryConsole, Programs
from tests.fakes.programs import FakePrograms

IMAGE = f"example/base:new@sha256:{'2' * 64}"
LOCAL = "debian:newbird (made by mmdebstrap)"
APT = Apt(
    sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),), proxy="http://proxy.example.test:3142"
)
HOST = Host(read_apt=lambda: APT)


Ensure = Callable[..., base.Base]


@pytest.fixture
def ensure(tiny: Project) -> Ensure:
    def call(engine: FakeEngine, *, fresh: bool = False, release: str = "newbird") -> base.Base:
        work = Work(engine=engine, project=tiny, host=HOST, view=View(MemoryConsole()))
        return base.ensure(work, release, fresh=fresh)

    return call


@pytest.fixture
def mmdebstrap(monkeypatch: pytest.MonkeyPatch) -> FakePrograms:
    """A machine with mmdebstrap that works."""
    programs = FakePrograms()
    monkeypatch.setattr(base, "Programs", lambda: programs)
    for module in ("builder.build.bootstrap", "builder.index.mmdebstrap"):
        monkeypatch.setattr(f"{module}.KEYRING", "/dev/null")
    monkeypatch.setattr("subprocess.run", Programs(lambda _: (0, "", "")))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return programs


def test_a_present_base_is_used(ensure: Ensure) -> None:
    engine = FakeEngine(registry=False)
    engine.add_image(IMAGE)
    assert ensure(engine) == base.Base(reference=IMAGE, name=IMAGE)
    assert engine.calls == []


def test_a_base_is_pulled(ensure: Ensure) -> None:
    engine = FakeEngine()
    assert ensure(engine) == base.Base(reference=IMAGE, name=IMAGE)
    assert engine.calls == [f"pull {IMAGE}"]


def test_a_base_is_built_if_it_cannot_be_pulled(ensure: Ensure, mmdebstrap: FakePrograms) -> None:
    engine = FakeEngine(registry=False)
    built = ensure(engine)
    assert built.name == LOCAL
    assert built.reference.startswith("gpu-images/base:newbird-")
    assert engine.calls == [f"pull {IMAGE}", f"import {built.reference}"]
    [program] = mmdebstrap.calls
    command = list(program.command)
    assert command[-2] == "newbird"
    assert '--aptopt=Acquire::http::Proxy "http://proxy.example.test:3142";' in command
    # The mirror is used, and removed from the result.
    assert any(
        word.startswith("--customize-hook=cp ") and word.endswith('"$1/etc/apt/sources.list"') for word in command
    )


@pytest.mark.parametrize(("fresh", "builds"), [(False, 1), (True, 2)])
def test_a_built_base_is_used_again_unless_fresh(
    ensure: Ensure, mmdebstrap: FakePrograms, fresh: bool, builds: int
) -> None:
    engine = FakeEngine(registry=False)
    built = ensure(engine)
    engine.calls.clear()
    assert ensure(engine, fresh=fresh) == built
    assert bool(engine.calls) is fresh
    assert len(mmdebstrap.calls) == builds


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.usefixtures("mmdebstrap")
def test_a_replaced_base_is_removed(ensure: Ensure, changed: bool) -> None:
    """A `<none>` image of 122 MB stayed after each build of a new base."""
    engine = FakeEngine(registry=False)
    reference = ensure(engine).reference
    if changed:
        engine.known[reference] = replace(engine.known[reference], id="sha256:old")
    ensure(engine, fresh=True)
    assert [call for call in engine.calls if call.startswith("remove")] == (["remove sha256:old"] if changed else [])


def test_each_release_has_its_own_base(ensure: Ensure, mmdebstrap: FakePrograms) -> None:
    engine = FakeEngine(registry=False)
    assert ensure(engine).reference != ensure(engine, release="oldbird").reference
    assert [program.command[-2] for program in mmdebstrap.calls] == ["newbird", "oldbird"]


def test_a_full_disk_while_pulling_is_an_error(
    ensure: Ensure, monkeypatch: pytest.MonkeyPatch, mmdebstrap: FakePrograms
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
        f"base: cannot be pulled (pulling {IMAGE}: no registry answers), "
        "and mmdebstrap cannot build it: it is not installed"
    )
    assert caught.value.hint == "As root on Debian or Ubuntu: apt-get install mmdebstrap debian-archive-keyring"


def test_root_on_debian_installs_mmdebstrap_first(
    ensure: Ensure, monkeypatch: pytest.MonkeyPatch, mmdebstrap: FakePrograms
) -> None:
    installs = Programs(lambda _: (0, "", ""))

    def which(name: str) -> str | None:
        installed = any("install" in call for call in installs.calls)
        return f"/bin/{name}" if name == "apt-get" or installed else None

    monkeypatch.setattr("subprocess.run", installs)
    monkeypatch.setattr("shutil.which", which)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert ensure(FakeEngine(registry=False)).name == LOCAL
    assert [call[1] for call in installs.calls if call[0] == "apt-get"] == ["update", "install"]
    assert len(mmdebstrap.calls) == 1


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        ("E: write: No space left on device", DiskError, "is full"),
        ("E: http://mirror.example.test/debian newbird Release 404", EngineError, r"mmdebstrap failed \(newbird"),
    ],
)
def test_mmdebstrap_fails(
    ensure: Ensure, mmdebstrap: FakePrograms, output: str, kind: type[BuilderError], message: str
) -> None:
    mmdebstrap.status, mmdebstrap.output = 25, ["I: begins"] * 20 + [output]
    engine = FakeEngine(registry=False)
    with pytest.raises(kind, match=message) as caught:
        ensure(engine)
    assert "mirror.example.test" not in str(caught.value)
    assert len(str(caught.value).splitlines()) == 9
    assert not any(call.startswith("import") for call in engine.calls)
    assert caught.value.hint.startswith(
        "Error of the registry: " if kind is EngineError else "Free disk space: `builder clean`"
    )
