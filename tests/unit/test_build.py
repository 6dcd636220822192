"""The method `dockerfile`: what is handed to the engine, what is found again, and whose fault a failure is."""

from __future__ import annotations

import base64
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from builder import base, build, context, plan, render
from builder.base import Base
from builder.build import DockerfileBuilder
from builder.engine import RUN_LABEL
from builder.errors import BuildError, DiskError, EngineError
from builder.host import Host
from builder.index import IndexSettings
from builder.plan import PlannedImage
from builder.project import Project
from builder.settings import PLAN_LABEL
from builder.trace import Output, Status, Vertex
from builder.view import View
from builder.work import Work
from tests.unit.fakes import FakeEngine, MemoryConsole
from tests.unit.test_context import content, members
from tests.unit.test_trace import encode

CELL = "qz-0.5-cu129-py311"
BASE = Base(reference="local/base:1", name="example (made here)")
LENDER = Host(
    index=IndexSettings(url="http://mirror.example.test/simple"),
    ca=b"pem",
    proxies={"HTTP_PROXY": "http://p.example.test"},
)


@pytest.fixture
def image(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> PlannedImage:
    monkeypatch.setattr(base, "ensure", lambda *_: BASE)
    made = plan.make_locked(tiny, tiny.select([CELL]))
    render.write(tiny.root, render.render(tiny.root, tiny.matrix, made))
    return made.images[0]


def method(engine: FakeEngine, project: Project) -> DockerfileBuilder:
    return DockerfileBuilder(Work(engine=engine, project=project, host=LENDER, view=View(MemoryConsole())))


def run(engine: FakeEngine, project: Project, image: PlannedImage) -> str:
    builder = method(engine, project)
    builder.prepare([image])
    return builder.build(image)


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
    assert method(engine, tiny).find(image) == ""
    made = run(engine, tiny, image)
    assert method(engine, tiny).find(image) == made
    assert build.built_ids(tiny.state) == {made}
    assert engine.calls == [f"build {CELL} on local/base:1"]
    assert engine.labels[CELL] == {"org.opencontainers.image.base.name": "example (made here)"}
    assert engine.builds == [("", False)]


def test_a_stage_has_a_row_of_its_own_and_is_this_checkouts_alone(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    console = MemoryConsole()
    work = Work(engine=engine, project=tiny, host=LENDER, view=View(console))
    build.run(work, CELL, "os-x", context.make(tiny.root, image, {}), BASE, target="os", fresh=True)
    assert engine.builds == [("os", True)]
    assert engine.labels[CELL] == {RUN_LABEL: str(tiny.root)}
    assert (tiny.logs / "os-x.log").is_file()
    assert console.text == "os-x: building\n"


def test_an_image_with_our_labels_that_we_did_not_build_is_not_taken(tiny: Project, image: PlannedImage) -> None:
    """Whoever writes FROM one of our images inherits its labels."""
    engine = FakeEngine()
    engine.have("sha256:derived", labels={PLAN_LABEL: image.digest})
    assert method(engine, tiny).find(image) == ""


def test_an_image_of_another_plan_is_not_taken(tiny: Project, image: PlannedImage) -> None:
    """The record is of this plan, but the engine's image says another: somebody copied records about."""
    engine = FakeEngine()
    made = run(engine, tiny, image)
    engine.known[made] = replace(engine.known[made], labels={PLAN_LABEL: "sha256:0"})
    assert method(engine, tiny).find(image) == ""


@pytest.mark.parametrize("record", ["", "sha256:0", "../x", "\xff"])
def test_a_damaged_record_is_none(tiny: Project, image: PlannedImage, record: str) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    next((tiny.state / "built").iterdir()).write_text(record, encoding="latin-1")
    assert method(engine, tiny).find(image) == ""


def test_an_image_that_was_removed_is_not_found(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    engine.known.clear()
    assert method(engine, tiny).find(image) == ""


def test_what_is_lent_is_in_the_context_and_not_in_the_checkout(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    run(engine, tiny, image)
    lent = {"templates/host/ca.crt", "templates/host/index.env"}
    assert lent <= set(members(engine.contexts[CELL]))
    assert not any((tiny.root / name).exists() for name in lent)


def test_a_file_that_is_edited_meanwhile_belongs_to_the_next_plan(tiny: Project, image: PlannedImage) -> None:
    engine = FakeEngine()
    builder = method(engine, tiny)
    builder.prepare([image])
    name = "templates/base/files/etc/profile.d/10-venv.sh"
    before = (tiny.root / name).read_bytes()
    (tiny.root / name).write_text("edited")
    builder.build(image)
    assert content(engine.contexts[CELL], name) == before


def test_a_base_for_each_release_once(tiny: Project, image: PlannedImage, monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[str] = []

    def ensure(_: object, __: object, release: str, *___: object) -> Base:
        releases.append(release)
        return Base(reference=f"local/{release}", name=release)

    monkeypatch.setattr(base, "ensure", ensure)
    engine = FakeEngine()
    builder = method(engine, tiny)
    images: Sequence[PlannedImage] = [image, replace(image, debian="oldbird"), image]
    builder.prepare(images)
    assert releases == ["newbird", "oldbird"]
    builder.build(image)
    assert engine.calls == [f"build {CELL} on local/newbird"]


def test_the_disk_is_looked_at_before_anything_is_built(
    tiny: Project, image: PlannedImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine()
    engine.told = replace(engine.told, is_local=True)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskError, match=r"building 1 image\(s\) takes about 2.0 GB in /nowhere, which has 1 kB"):
        run(engine, tiny, image)
    assert engine.calls == []


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
    assert method(engine, tiny).find(image) == ""


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
