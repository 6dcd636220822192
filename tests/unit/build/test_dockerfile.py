"""The method `dockerfile`: the build, images that are found again, and errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from builder.build import dockerfile
from builder.build.dockerfile import DockerfileBuilder, context_files
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.build.programs import Program
from builder.common.errors import BuildError, DiskError, EngineError
from builder.common.files import digest_of_data
from builder.debian.archives import Archives
from builder.engine.model import LoadedImage
from builder.index.host import Apt, AptSource, Host
from builder.index.settings import IndexSettings
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan, render
from builder.plan.plan import PlannedImage
from tests.fakes import locks
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole
from tests.fakes.mmdebstrap import FakeDebian
from tests.fakes.programs import FakePrograms
from tests.fakes.run import new_run

Edit = Callable[[str, str], Project]
CELL = "qz-0.5-cu129-py311"
HOST = Host(
    index=IndexSettings(url="http://mirror.example.test/simple"),
    ca=b"pem",
    proxies={"HTTP_PROXY": "http://p.example.test"},
)
SOURCES = tuple(AptSource(kind=kind, uri=f"http://{kind}.example.test/") for kind in ("main", "security"))


class Buildx(FakePrograms):
    """Runs no buildx: the image has the labels of the command line. Keeps the files of each build."""

    def __init__(self, engine: FakeEngine) -> None:
        super().__init__()
        self.engine = engine
        self.contexts: list[dict[str, bytes]] = []
        self.before: Callable[[], object] = lambda: None

    def run(self, program: Program, on_line: Callable[[str], str]) -> int:
        self.before()
        folder = program.folder
        self.contexts.append(
            {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        )
        labels = dict(word.removeprefix("--label=").split("=", 1) for word in program.command if "--label" in word)
        image_id = digest_of_data(labels)
        self.files = {"../id": image_id.encode()}
        if self.status == 0:
            self.engine.add_image(image_id, labels=labels)
        return super().run(program, on_line)


class TinyProject:
    """An engine, and the tiny project with one rendered image."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.engine = FakeEngine()
        self.console = MemoryConsole()
        self.run = new_run(project, engine=self.engine, host=HOST, console=self.console)
        self.buildx = Buildx(self.engine)
        [self.image] = self.rendered(CELL)

    def rendered(self, *cells: str) -> tuple[PlannedImage, ...]:
        planned = plan.make_locked_plan(self.project, self.project.select(cells))
        render.write_rendered(self.project.root, render.render(self.project, planned))
        return planned.images

    @property
    def builder(self) -> DockerfileBuilder:
        runner = FakeDebian(self.run)
        archives = Archives(self.project.matrix, Host(archives=Apt(sources=SOURCES)), runner)
        return DockerfileBuilder(SystemLayers(self.run, LayerLookup.of(self.run), runner, archives))

    def build(self, image: PlannedImage | None = None) -> LoadedImage:
        """Builds an image in a run of its own."""
        builder = self.builder
        builder.start([image or self.image])
        return builder.build(image or self.image)


@pytest.fixture
def checkout(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> TinyProject:
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    checkout = TinyProject(tiny)
    monkeypatch.setattr(dockerfile, "Programs", lambda: checkout.buildx)
    return checkout


def test_the_image_has_the_digest_of_the_plan(checkout: TinyProject) -> None:
    image_id = checkout.build().id
    assert checkout.engine.known[image_id].labels == {PLAN_LABEL: checkout.image.plan}


def test_an_image_for_another_architecture_than_the_engines_is_refused(checkout: TinyProject) -> None:
    checkout.engine.settings = replace(INFO, architecture="aarch64")
    with pytest.raises(EngineError, match="can make images only for arm64 on this machine"):
        checkout.build()
    assert checkout.buildx.calls == []


def test_the_command_line_of_buildx(checkout: TinyProject) -> None:
    """The address of a proxy may have a password: its value is in the environment alone."""
    checkout.build()
    [program] = checkout.buildx.calls
    command = list(program.command)
    assert command[:3] == ["docker", "buildx", "build"]
    assert command[-1] == str(program.folder)
    assert f"--file={program.folder}/images/{CELL}/plain.Dockerfile" in command
    assert [word for word in command if word.startswith("--build-arg")] == [
        "--build-arg=BASE=local/newbird", "--build-arg=HTTP_PROXY",
    ]  # fmt: skip
    assert program.environment["HTTP_PROXY"] == "http://p.example.test"


def test_a_build_takes_locked_packages_from_where_the_assembler_does(checkout: TinyProject) -> None:
    """Debian's lists no longer name a package that has a newer version, but the pool still has its file."""
    checkout.build()
    pools = checkout.buildx.contexts[-1]["templates/host/pools"].decode().splitlines()
    assert pools == ["http://main.example.test/pool/main", "http://security.example.test/pool/updates/main"]


def test_without_docker_no_build_begins(checkout: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(EngineError, match="needs the `docker` command and its plugin buildx"):
        checkout.build()


def test_the_record_is_of_what_the_engine_built(checkout: TinyProject) -> None:
    """BuildKit's cache decides what is built again: another plan gives another image."""
    first = checkout.build()
    assert (first.origin, checkout.build().origin) == ("built", "present")
    other = checkout.build(replace(checkout.image, plan="sha256:other"))
    assert (other.id != first.id, other.origin) == (True, "built")


def test_images_of_a_group_are_built_from_their_own_dockerfiles(checkout: TinyProject) -> None:
    """Both lie in one folder and read the same lists."""
    images = checkout.rendered(CELL, f"{CELL}-board")
    ids = [checkout.build(planned).id for planned in images]
    assert len(set(ids)) == 2
    labels = [checkout.engine.known[image_id].labels[PLAN_LABEL] for image_id in ids]
    assert labels == [image.plan for image in images]
    assert (checkout.project.logs / f"{CELL}-board.log").is_file()


def test_files_of_the_build_host_are_in_the_context_alone(checkout: TinyProject) -> None:
    checkout.build()
    names = {"templates/host/ca.crt", "templates/host/index.env"}
    assert names <= set(checkout.buildx.contexts[0])
    assert not any((checkout.project.root / name).exists() for name in names)


def test_an_error_shows_the_end_of_the_output_but_no_mirror(checkout: TinyProject) -> None:
    checkout.buildx.status = 1
    checkout.buildx.output = [
        *(f"#7 {number}" for number in range(50)),
        "#7 ERROR: http://mirror.example.test/x",
        "ERROR: failed",
    ]
    with pytest.raises(BuildError) as caught:
        checkout.build()
    lines = str(caught.value).splitlines()
    assert (lines[1], lines[-2:], len(lines)) == (
        "  | #7 12",
        ["  | #7 ERROR: http://<mirror>/x", "  | ERROR: failed"],
        41,
    )


def test_a_full_disk_is_named(checkout: TinyProject) -> None:
    checkout.buildx.status, checkout.buildx.output = 1, ["#9 1.2 write /var/lib/x: no space left on device"]
    with pytest.raises(DiskError, match="the disk filled up"):
        checkout.build()


def test_a_step_is_shown_without_its_mounts(checkout: TinyProject) -> None:
    checkout.buildx.output = [
        "#1 [internal] load build definition",
        "#5 [os 2/2] RUN --mount=type=bind,source=a,target=/b --mount=type=cache,target=/c sh /mnt/steps/os.sh python3",
        "#8 DONE 0.1s",
    ]
    checkout.build()
    assert checkout.console.text == f"{CELL}: building\n{CELL}: [os 2/2] RUN sh /mnt/steps/os.sh python3\n"


# ---- the build context

GROUP = "em-1.10-cu1210-py311"


def names_of(project: Project, image: PlannedImage) -> set[str]:
    files = context_files(project, image)
    assert files == {name: project.root / name for name in files}
    return set(files)


def test_the_context_has_what_the_dockerfile_reads_and_nothing_else(checkout: TinyProject) -> None:
    """The folder of the group also has Dockerfiles of other variants, and lists of their components."""
    root = checkout.project.root
    images = {image.id: image for image in checkout.rendered(GROUP, f"{GROUP}-jupyter", f"{GROUP}-board")}
    image = images[f"{GROUP}-jupyter"]
    for name in ("templates/host/ca.crt", "templates/pytorch/x", f"images/{GROUP}/other.Dockerfile"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("other")
    lists = ("cuda.txt", "wheels-python.txt", "wheels-ember.txt", "wheels-board.txt", "wheels-jupyter.txt")
    rendered = {f"images/{GROUP}/{name}" for name in ("jupyter.Dockerfile", "constraints.txt", *lists)}
    templates = {
        path.relative_to(root).as_posix()
        for component in image.components
        for path in (root / "templates" / component).rglob("*")
        if path.is_file()
    }
    assert names_of(checkout.project, image) == {*plan.COMMON_INPUTS, image.os_request.path, *rendered, *templates}
    assert {f"{plan.STEPS}/{path.name}" for path in (root / plan.STEPS).iterdir()} <= names_of(checkout.project, image)
    lists_of_plain = {f"images/{GROUP}/{name}" for name in ("cuda.txt", "wheels-python.txt", "wheels-ember.txt")}
    assert {name for name in names_of(checkout.project, images[GROUP]) if name.endswith(".txt") and GROUP in name} == {
        *lists_of_plain, f"images/{GROUP}/constraints.txt",
    }  # fmt: skip


def test_modes_do_not_depend_on_the_checkout(checkout: TinyProject) -> None:
    """As under a umask of 077: only the owner's bits are left."""
    seen: list[dict[str, int]] = []

    def look() -> None:
        [scratch] = (checkout.project.state / "tmp").iterdir()
        paths = [path for path in (scratch / "context").rglob("*") if path.is_file()]
        seen.append({str(path.relative_to(scratch)): path.stat().st_mode for path in paths})

    checkout.buildx.before = look
    checkout.build()
    for path in context_files(checkout.project, checkout.image).values():
        path.chmod(path.stat().st_mode & 0o700)
    checkout.build()
    assert {name: value for name, value in seen[0].items() if "/host/" not in name} == {
        name: value for name, value in seen[1].items() if "/host/" not in name
    }


def test_links_stay_links(checkout: TinyProject) -> None:
    """Their targets are paths of the image, not of the checkout."""
    folder = checkout.project.root / "templates/base/files/usr/lib"
    folder.mkdir(parents=True)
    (folder / "it.so.1").symlink_to("/opt/nowhere/it.so.1")
    targets: list[str] = []

    def look() -> None:
        [scratch] = (checkout.project.state / "tmp").iterdir()
        targets.append(str((scratch / "context/templates/base/files/usr/lib/it.so.1").readlink()))

    checkout.buildx.before = look
    checkout.build()
    assert targets == ["/opt/nowhere/it.so.1"]


def test_the_login_of_an_index_is_a_secret_of_the_build(
    checkout: TinyProject, edit: Edit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the environment of buildx alone, on no disk."""
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "s3cret")
    url = "https://python.example.test/simple"
    edit("debian:\n", f"indexes: {{company: {url}}}\ndebian:\n")
    project = edit("packages: [pip]", "packages: [pip], index: company")
    lock = locks.locks(project)[CELL]
    wheels = tuple(replace(wheel, index="company") if wheel.name == "pip" else wheel for wheel in lock.wheels)
    (project.root / GROUP_LOCKS.path(CELL)).write_text(GROUP_LOCKS.dump(replace(lock, wheels=wheels)))
    checkout.project = project
    host = replace(HOST, index=HOST.index.with_index("company", url))
    checkout.run = replace(checkout.run, checkout=project, host=host)
    [image] = checkout.rendered(CELL)
    checkout.build(image)
    [program] = checkout.buildx.calls
    assert program.environment["GPU_IMAGES_NETRC"] == "machine python.example.test login __token__ password s3cret\n"
    assert "--secret=id=netrc,env=GPU_IMAGES_NETRC" in program.command
    assert not any("s3cret" in argument for argument in program.command)
    assert not any(b"s3cret" in content for content in checkout.buildx.contexts[0].values())

    monkeypatch.delenv("UV_INDEX_COMPANY_PASSWORD")
    monkeypatch.setenv("NETRC", "/nonexistent")
    checkout.build(image)
    assert "GPU_IMAGES_NETRC" not in checkout.buildx.calls[1].environment
    assert not any("--secret" in word for word in checkout.buildx.calls[1].command)
