"""One build: what is handed to the engine, and whose fault a failure is."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from builder import build, context, plan, render
from builder.base import Base
from builder.errors import BuildError, DiskError, EngineError
from builder.host import Host
from builder.index import IndexSettings
from builder.plan import PlannedImage
from builder.project import Project
from builder.trace import Output, Status, Vertex
from builder.view import View
from tests.unit.fakes import FakeEngine, MemoryConsole
from tests.unit.test_context import members
from tests.unit.test_trace import encode

CELL = "qz-0.5-cu129-py311"
BASE = Base(reference="local/base:1", name="example (made here)")
LENDER = Host(
    index=IndexSettings(url="http://mirror.example.test/simple"),
    ca=b"pem",
    proxies={"HTTP_PROXY": "http://p.example.test"},
)


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    made = plan.make_locked(tiny, tiny.select([CELL]))
    render.write(tiny.root, render.render(tiny.root, tiny.matrix, made))
    return made.images[0]


def run(engine: FakeEngine, project: Project, image: PlannedImage) -> str:
    made = context.make(project.root, image, LENDER.files("bookworm"))
    return build.build(engine, project, image, made, BASE, LENDER, "abc", View(MemoryConsole()))


def trace(*, error: str = "", text: str = "") -> dict[str, Any]:
    """A step that prints and, with an error, fails."""
    vertex = Vertex(digest="a", name="[image 2/3] RUN true", started=1, completed=2, error=error)
    printed = Status(vertices=(Vertex(digest="a", name="x", started=1),), output=(Output(vertex="a", text=text),))
    return {
        "id": "moby.buildkit.trace",
        "aux": base64.b64encode(encode(printed) + encode(Status(vertices=(vertex,)))).decode(),
    }


def test_built_and_found_again(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    assert build.find(engine, tiny.state, image) == ""
    made = run(engine, tiny, image)
    assert build.find(engine, tiny.state, image) == made
    assert build.built_ids(tiny.state) == {made}
    assert engine.calls == [f"build {CELL} on local/base:1"]
    assert engine.labels[CELL] == {
        "org.opencontainers.image.revision": "abc",
        "org.opencontainers.image.base.name": "example (made here)",
    }


def test_an_image_with_our_labels_that_we_did_not_build_is_not_taken(tiny: Project, image: PlannedImage) -> None:
    """Whoever writes FROM one of our images inherits its labels."""
    engine = FakeEngine()
    engine.have("sha256:derived", labels={build.PLAN_LABEL: image.digest})
    assert build.find(engine, tiny.state, image) == ""


@pytest.mark.parametrize("record", ["", "sha256:0", "../x", "\xff"])
def test_a_damaged_record_is_none(tiny: Project, image: PlannedImage, record: str) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    next((tiny.state / "built").iterdir()).write_text(record, encoding="latin-1")
    assert build.find(engine, tiny.state, image) == ""


def test_an_image_that_was_removed_is_not_found(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    engine.known.clear()
    assert build.find(engine, tiny.state, image) == ""


def test_what_is_lent_is_in_the_context_and_not_in_the_checkout(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    lent = {"templates/host/ca.crt", "templates/host/index.env"}
    assert lent <= set(members(engine.contexts[CELL]))
    assert not any((tiny.root / name).exists() for name in lent)


FAILURES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a step": ({"error": "process /bin/sh did not complete: exit code: 1"}, BuildError, "failed at the build"),
    "disk": ({"error": "write /var/lib/x: no space left on device"}, DiskError, "the disk filled up"),
    "quota": ({"error": "Disk quota exceeded"}, DiskError, "the disk filled up"),
    "connection": ({"error": "read tcp: connection reset by peer"}, EngineError, "connection reset"),
    "registry": ({"error": "failed to resolve source metadata for x"}, EngineError, "failed to resolve"),
    "no last word": ({"stream": "x"}, EngineError, "Docker Engine ended the build without a word"),
}


@pytest.mark.parametrize(("message", "kind", "says"), FAILURES.values(), ids=FAILURES.keys())
def test_whose_fault_it_is(
    tiny: Project, image: PlannedImage, message: dict[str, Any], kind: type[Exception], says: str
) -> None:
    engine = FakeEngine()
    engine.broken[CELL] = message
    with pytest.raises(kind, match=says) as caught:
        run(engine, tiny, image)
    assert str(caught.value).startswith(f"{CELL}: ")
    assert build.find(engine, tiny.state, image) == ""


def test_a_full_disk_that_only_the_step_tells_of(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    messages = [trace(error="exit code: 1", text="cp: No space left on device\n"), {"error": "exit code: 1"}]
    engine.build = lambda *_, **__: iter(messages)  # type: ignore[method-assign]
    with pytest.raises(DiskError):
        run(engine, tiny, image)


def test_the_step_that_failed_its_last_lines_and_no_mirror(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    messages = [trace(error="exit code: 1", text="GET http://mirror.example.test/x\nno\n"), {"error": "exit code: 1"}]
    engine.build = lambda *_, **__: iter(messages)  # type: ignore[method-assign]
    with pytest.raises(BuildError) as caught:
        run(engine, tiny, image)
    assert str(caught.value).splitlines() == [
        f"{CELL}: failed at [image 2/3] RUN true",
        "  | GET http://<mirror>/x",
        "  | no",
    ]
    assert caught.value.hint == f"Whole log: .builder/logs/{CELL}.log"
    assert "mirror.example.test" not in (tiny.logs / f"{CELL}.log").read_text()


@pytest.mark.parametrize("aux", ["not base64", base64.b64encode(b"\x0a\x05a").decode()])
def test_a_message_that_cannot_be_decoded_is_the_engines_fault(tiny: Project, image: PlannedImage, aux: str) -> None:
    engine = FakeEngine()
    engine.broken[CELL] = {"id": "moby.buildkit.trace", "aux": aux}
    with pytest.raises(EngineError):
        run(engine, tiny, image)


def test_need_counts_shared_wheels_once(tiny: Project) -> None:
    one = plan.make_locked(tiny, tiny.select([CELL]))
    two = plan.make_locked(tiny, tiny.select([CELL, f"{CELL}-board"]))
    assert build.need(one) == int(one.unique_bytes * 3.6) + build.SPARE
    assert build.need(two) < build.need(one) * 2 - build.SPARE


def test_check_disk(tiny: Project) -> None:
    made = plan.make_locked(tiny, tiny.select([CELL]))
    build.check_disk(build.need(made), made, "/x")
    with pytest.raises(DiskError, match=r"building 1 image\(s\) takes about .* in /x, which has") as caught:
        build.check_disk(build.need(made) - 1, made, "/x")
    assert "builder clean" in caught.value.hint
