"""The method `dockerfile`: the build, images that are found again, and errors."""

from __future__ import annotations

import base64
import shutil
from dataclasses import replace
from typing import Any

import pytest

from builder.build import base, dockerfile
from builder.build.base import Base
from builder.build.dockerfile import Build, DockerfileBuilder
from builder.build.work import Work, built_ids
from builder.common.console import View
from builder.common.errors import BuildError, DiskError, EngineError
from builder.engine.client import RUN_LABEL
from builder.engine.trace import Output, Status, Vertex
from builder.index.host import Host
from builder.index.settings import IndexSettings
from builder.matrix.project import Project
from builder.matrix.tags import BASE_LABEL, PLAN_LABEL
from builder.plan import plan, render
from builder.plan.plan import PlannedImage
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole
from tests.unit.build.test_context import content, members
from tests.unit.engine.test_trace import encode

CELL = "qz-0.5-cu129-py311"
BASE = Base(reference="local/base:1", name="example (made here)")
HOST = Host(
    index=IndexSettings(url="http://mirror.example.test/simple"),
    ca=b"pem",
    proxies={"HTTP_PROXY": "http://p.example.test"},
)


class Bench:
    """An engine, and the tiny project with one rendered image."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.engine = FakeEngine()
        self.console = MemoryConsole()
        self.work = Work(engine=self.engine, project=project, host=HOST, view=View(self.console))
        [self.image] = self.rendered(CELL)

    def rendered(self, *cells: str) -> tuple[PlannedImage, ...]:
        planned = plan.make_locked(self.project, self.project.select(cells))
        root = self.project.root
        render.write(root, render.render(root, self.project.matrix, planned))
        return planned.images

    def find(self, image: PlannedImage | None = None) -> str:
        return DockerfileBuilder(self.work).find(image or self.image)

    def prepared(self, image: PlannedImage | None = None) -> DockerfileBuilder:
        builder = DockerfileBuilder(self.work)
        builder.prepare([image or self.image])
        return builder

    def run(self, image: PlannedImage | None = None) -> str:
        """Builds an image in a run of its own; returns its id."""
        return self.prepared(image).build(image or self.image)[0]


@pytest.fixture
def bench(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(base, "ensure", lambda *_: BASE)
    return Bench(tiny)


def trace(*, error: str = "", text: str = "") -> dict[str, Any]:
    """A step that prints and, with an error, fails."""
    vertex = Vertex(digest="a", name="[image 2/3] RUN true", started=1, completed=2, error=error)
    printed = Status(vertices=(Vertex(digest="a", name="x", started=1),), output=(Output(vertex="a", text=text),))
    return {
        "id": "moby.buildkit.trace",
        "aux": base64.b64encode(encode(printed) + encode(Status(vertices=(vertex,)))).decode(),
    }


def test_built_and_found_again(bench: Bench) -> None:
    assert bench.find() == ""
    image_id = bench.run()
    assert bench.find() == image_id
    assert built_ids(bench.project.state) == {image_id}
    assert bench.engine.calls == [f"build {CELL} on local/base:1"]
    assert bench.engine.labels[CELL] == {BASE_LABEL: "example (made here)", PLAN_LABEL: bench.image.digest}
    assert bench.engine.builds == [""]


def test_a_stage_has_its_own_row_and_log_and_is_marked_for_removal(bench: Bench) -> None:
    context = dockerfile.context(bench.project.root, bench.image, {})
    build = Build(image=bench.image, name="os-x", context=context, base=BASE, target="os")
    dockerfile.run(bench.work, build)
    assert bench.engine.builds == ["os"]
    assert bench.engine.labels[CELL] == {RUN_LABEL: str(bench.project.root)}
    assert (bench.project.logs / "os-x.log").is_file()
    assert bench.console.text == "os-x: building\n"


def test_an_image_with_our_labels_from_elsewhere_is_not_found(bench: Bench) -> None:
    """An image built FROM an image of this project inherits its labels."""
    bench.engine.add_image("sha256:derived", labels={PLAN_LABEL: bench.image.digest})
    assert bench.find() == ""


def test_an_image_of_another_plan_is_not_found(bench: Bench) -> None:
    """The record is of this plan, but the engine's image is not: records were copied."""
    image_id = bench.run()
    bench.engine.known[image_id] = replace(bench.engine.known[image_id], labels={PLAN_LABEL: "sha256:0"})
    assert bench.find() == ""


@pytest.mark.parametrize("record", ["", "sha256:0", "../x", "\xff"])
def test_a_damaged_record_is_ignored(bench: Bench, record: str) -> None:
    bench.run()
    next((bench.project.state / "built").iterdir()).write_text(record, encoding="latin-1")
    assert bench.find() == ""


READ = [
    "templates/steps/wheels.sh", "templates/steps/uv.sh", "templates/steps/os.sh", "templates/steps/compile.py",
    "templates/host/env.sh", "templates/base/files/usr/local/lib/workstation/gpus.py", "templates/base/files/etc/new",
    "locks/uv.txt", f"images/{CELL}/plain.Dockerfile", f"images/{CELL}/constraints.txt", f"images/{CELL}/cuda.txt",
    f"images/{CELL}/wheels-quartz.txt",
]  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_changed_input_means_another_build(bench: Bench, name: str) -> None:
    """By its content: the plan does not cover the scripts that only this method runs."""
    image_id = bench.run()
    path = bench.project.root / name
    before = path.read_bytes() if path.exists() else None
    path.write_bytes((before or b"") + b"# more\n")
    assert bench.find() == ""
    bench.run()
    assert content(bench.engine.contexts[CELL], name).endswith(b"# more\n")
    assert bench.find() == image_id
    path.unlink() if before is None else path.write_bytes(before)
    assert bench.find() == image_id


def test_a_file_that_is_edited_during_the_build_belongs_to_the_next_one(bench: Bench) -> None:
    """The image was built with the old script, so it is not what the new one gives."""
    builder = bench.prepared()
    name = "templates/steps/wheels.sh"
    before = (bench.project.root / name).read_bytes()
    (bench.project.root / name).write_bytes(before + b"# edited\n")
    image_id, _ = builder.build(bench.image)
    assert content(bench.engine.contexts[CELL], name) == before
    assert bench.find() == ""
    (bench.project.root / name).write_bytes(before)
    assert bench.find() == image_id


def test_a_changed_mode_means_another_build(bench: Bench) -> None:
    """COPY keeps the mode."""
    bench.run()
    (bench.project.root / "templates/base/files/etc/variables.d/base.json").chmod(0o755)
    assert bench.find() == ""


def test_two_plans_of_the_same_files_have_a_record_each(bench: Bench) -> None:
    """They differ in a label: the digest of the plan."""
    images = (bench.image, replace(bench.image, digest="sha256:other"))
    ids = [bench.run(planned) for planned in images]
    assert len(set(ids)) == 2
    assert [bench.find(planned) for planned in images] == ids


def test_images_of_a_group_are_built_from_their_own_dockerfiles(bench: Bench) -> None:
    """Both lie in one folder and read the same lists."""
    images = bench.rendered(CELL, f"{CELL}-board")
    ids = [bench.run(planned) for planned in images]
    assert [bench.find(planned) for planned in images] == ids
    assert len(set(ids)) == 2
    assert bench.engine.calls == [f"build {CELL} on local/base:1", f"build {CELL}-board on local/base:1"]
    assert bench.engine.labels[CELL][PLAN_LABEL] != bench.engine.labels[f"{CELL}-board"][PLAN_LABEL]
    assert (bench.project.logs / f"{CELL}-board.log").is_file()


def test_an_image_that_was_removed_is_not_found(bench: Bench) -> None:
    bench.run()
    bench.engine.known.clear()
    assert bench.find() == ""


def test_files_of_the_build_host_are_in_the_context_alone(bench: Bench) -> None:
    bench.run()
    names = {"templates/host/ca.crt", "templates/host/index.env"}
    assert names <= set(members(bench.engine.contexts[CELL]))
    assert not any((bench.project.root / name).exists() for name in names)


def test_each_release_has_one_base(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[str] = []

    def ensure(_: object, release: str) -> Base:
        releases.append(release)
        return Base(reference=f"local/{release}", name=release)

    monkeypatch.setattr(base, "ensure", ensure)
    builder = DockerfileBuilder(bench.work)
    builder.prepare([bench.image, replace(bench.image, debian="oldbird"), bench.image])
    assert releases == ["newbird", "oldbird"]
    builder.build(bench.image)
    assert bench.engine.calls == [f"build {CELL} on local/newbird"]


def test_too_little_room_is_reported_before_the_build(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.engine.settings = replace(INFO, is_local=True)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(
        DiskError, match=r"building 1 image takes about 2.0 GB in /nowhere, which has 1 kB free"
    ) as caught:
        bench.run()
    assert "builder clean" in caught.value.hint
    assert bench.engine.calls == []


FAILURES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "a step": ({"error": "process /bin/sh did not complete: exit code: 1"}, BuildError, "failed at the build"),
    "disk": ({"error": "write /var/lib/x: no space left on device"}, DiskError, "the disk filled up"),
    "quota": ({"error": "Disk quota exceeded"}, DiskError, "the disk filled up"),
    "connection": ({"error": "read tcp: connection reset by peer"}, EngineError, "connection reset"),
    "registry": ({"error": "failed to resolve source metadata for x"}, EngineError, "failed to resolve"),
    "no message": ({"stream": "x"}, EngineError, "Docker Engine ended the build without an error message"),
}


@pytest.mark.parametrize(("message", "kind", "text"), FAILURES.values(), ids=FAILURES.keys())
def test_errors_by_cause(bench: Bench, message: dict[str, Any], kind: type[Exception], text: str) -> None:
    bench.engine.broken[CELL] = message
    with pytest.raises(kind, match=text) as caught:
        bench.run()
    assert str(caught.value).startswith(f"{CELL}: ")
    assert bench.find() == ""


def test_a_full_disk_in_the_output_of_the_step(bench: Bench) -> None:
    messages = [trace(error="exit code: 1", text="cp: No space left on device\n"), {"error": "exit code: 1"}]
    bench.engine.build = lambda *_, **__: iter(messages)  # type: ignore[method-assign]
    with pytest.raises(DiskError):
        bench.run()


def test_an_error_shows_the_step_and_its_last_lines_but_no_mirror(bench: Bench) -> None:
    messages = [trace(error="exit code: 1", text="GET http://mirror.example.test/x\nno\n"), {"error": "exit code: 1"}]
    bench.engine.build = lambda *_, **__: iter(messages)  # type: ignore[method-assign]
    with pytest.raises(BuildError) as caught:
        bench.run()
    assert str(caught.value).splitlines() == [
        f"{CELL}: failed at [image 2/3] RUN true",
        "  | GET http://<mirror>/x",
        "  | no",
    ]
    assert caught.value.hint == f"Full log: .builder/logs/{CELL}.log"
    assert "mirror.example.test" not in (bench.project.logs / f"{CELL}.log").read_text()


@pytest.mark.parametrize("aux", ["not base64", base64.b64encode(b"\x0a\x05a").decode()])
def test_an_invalid_progress_message_is_an_error_of_the_engine(bench: Bench, aux: str) -> None:
    bench.engine.broken[CELL] = {"id": "moby.buildkit.trace", "aux": aux}
    with pytest.raises(EngineError, match="invalid progress message"):
        bench.run()
