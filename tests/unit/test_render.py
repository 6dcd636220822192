"""Rendering: the text of Dockerfiles, and images/ kept exactly as it should be."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable

import pytest

from builder import oci, plan, render
from builder.errors import StaleError, TemplateError
from builder.project import Project

Edit = Callable[[str, str], Project]
CELL = "em-1.10-cu1210-py311-jupyter"
PLAIN = "qz-0.5-cu129-py311"


def rendered(project: Project, *wanted: str) -> dict[str, str]:
    made = plan.make_locked(project, project.select(wanted or (CELL, PLAIN)))
    return render.render(project.root, project.matrix, made)


@pytest.mark.parametrize("cell", [CELL, PLAIN])
def test_snapshot(tiny: Project, snapshot: Callable[[str, str], None], cell: str) -> None:
    """Masked is only the digest of the plan, which changes with every byte of templates/."""
    files = rendered(tiny, cell)
    digest = plan.make_locked(tiny, tiny.select([cell])).images[0].digest
    text = files[f"images/{cell}/Dockerfile"]
    assert text.count(digest) == 1
    snapshot(f"snapshots/{cell}.Dockerfile", text.replace(digest, "(masked)"))


def test_wheels_are_named_by_hash_alone(tiny: Project) -> None:
    files = rendered(tiny, PLAIN)
    assert sorted(files) == [
        f"images/{PLAIN}/{name}"
        for name in ("Dockerfile", "constraints.txt", "wheels-cuda.txt", "wheels-python.txt", "wheels-quartz.txt")
    ]
    [wheel] = plan.make(tiny, tiny.select([PLAIN])).images[0].of_component("quartz")
    assert files[f"images/{PLAIN}/wheels-quartz.txt"] == f"quartz==0.5.3 --hash=sha256:{wheel.sha256}\n"


def test_no_jinja_is_left_and_lines_end_well(tiny: Project) -> None:
    for name, text in rendered(tiny).items():
        assert not any(sign in text for sign in ("{{", "}}", "{%", "%}", "{#")), name
        assert text.endswith("\n"), name
        assert not any(line != line.rstrip() for line in text.splitlines()), name


def instructions(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{word} ")]


def test_the_last_command_wins_and_bash_is_the_default(tiny: Project) -> None:
    files = rendered(tiny)
    assert instructions(files[f"images/{CELL}/Dockerfile"], "CMD") == ['CMD ["start-jupyter"]']
    assert instructions(files[f"images/{PLAIN}/Dockerfile"], "CMD") == ['CMD ["bash"]']
    assert instructions(files[f"images/{CELL}/Dockerfile"], "EXPOSE") == ["EXPOSE 8888"]
    assert instructions(files[f"images/{PLAIN}/Dockerfile"], "EXPOSE") == []
    assert instructions(files[f"images/{PLAIN}/Dockerfile"], "HEALTHCHECK") == []


@pytest.mark.parametrize("cell", [CELL, PLAIN])
def test_the_dockerfile_says_what_the_configuration_of_an_assembled_image_says(tiny: Project, cell: str) -> None:
    text = rendered(tiny, cell)[f"images/{cell}/Dockerfile"].replace(" \\\n", " ")
    [image] = plan.make_locked(tiny, tiny.select([cell])).images
    config = json.loads(oci.config(image.settings, (), created="", labels={}))["config"]

    def pairs(word: str) -> dict[str, str]:
        [line] = instructions(text, word)
        return dict(pair.split("=", 1) for pair in shlex.split(line)[1:])

    assert [f"{name}={value}" for name, value in pairs("ENV").items()] == config["Env"]
    assert list(pairs("LABEL").items()) == list(config["Labels"].items())
    assert instructions(text, "USER") == [f"USER {config['User']}"]
    assert instructions(text, "WORKDIR") == [f"WORKDIR {config['WorkingDir']}"]
    assert instructions(text, "EXPOSE") == [f"EXPOSE {port[:-4]}" for port in config.get("ExposedPorts", ())]
    assert instructions(text, "ENTRYPOINT") == [f"ENTRYPOINT {json.dumps(config['Entrypoint'])}"]
    assert instructions(text, "CMD") == [f"CMD {json.dumps(config['Cmd'])}"]
    if health := config.get("Healthcheck"):
        [line] = instructions(text, "HEALTHCHECK")
        times = {"interval": "Interval", "timeout": "Timeout", "start-period": "StartPeriod"}
        options = [f"--{option}={health[field] // 10**9}s" for option, field in times.items()]
        command = ["CMD", json.dumps(health["Test"][1:])]
        assert line.split() == ["HEALTHCHECK", *options, f"--retries={health['Retries']}", *command]
    else:
        assert instructions(text, "HEALTHCHECK") == []


def test_nothing_of_the_machine_is_in_it(tiny: Project) -> None:
    assert not any(str(tiny.root) in text for text in rendered(tiny).values())


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{{ nothing }}", "'nothing' is undefined"),
        ("{{ image.nothing }}", "has no attribute 'nothing'"),
        ("{% if %}", "Expected an expression"),
        ("{% include 'absent.j2' %}", "absent.j2"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ image.id + 1 }}", "can only concatenate str"),
    ],
)
def test_a_wrong_template_is_named_with_its_line(tiny: Project, line: str, says: str) -> None:
    path = tiny.root / "templates/Dockerfile.j2"
    path.write_text(f"# one\n# two\n{line}\n")
    with pytest.raises(TemplateError) as caught:
        rendered(tiny, PLAIN)
    assert says in str(caught.value)
    assert str(caught.value).startswith("templates/Dockerfile.j2:3: ")
    assert PLAIN in str(caught.value)


def test_a_fault_in_a_macro_is_named_where_it_is(tiny: Project) -> None:
    path = tiny.root / "templates/macros.j2"
    path.write_text("{% macro host_mount() %}\n{{ nothing }}\n{% endmacro %}\n")
    with pytest.raises(TemplateError, match=r"^templates/macros.j2:2: 'nothing' is undefined"):
        rendered(tiny, PLAIN)


def test_no_template(tiny: Project) -> None:
    (tiny.root / "templates/Dockerfile.j2").unlink()
    files = tiny.root / "templates"
    with pytest.raises(TemplateError, match=r"Dockerfile.j2"):
        render.render(files.parent, tiny.matrix, plan.make_locked(tiny, tiny.select([PLAIN])))


def test_write_then_check_then_write_nothing(tiny: Project) -> None:
    files = rendered(tiny)
    assert render.write(tiny.root, files) == list(files)
    render.check(tiny.root, files)
    assert render.write(tiny.root, files) == []


def test_check_writes_nothing(tiny: Project) -> None:
    with pytest.raises(StaleError, match=f"images/{CELL}/Dockerfile: missing"):
        render.check(tiny.root, rendered(tiny))
    assert not (tiny.root / "images").exists()


DOCKERFILE = f"images/{PLAIN}/Dockerfile"
CHANGES = {
    "text": (DOCKERFILE, b"FROM scratch\n", f"{DOCKERFILE}: differs"),
    "not UTF-8": (DOCKERFILE, b"\xff\xfe", f"{DOCKERFILE}: differs"),
    "line ends": (DOCKERFILE, None, f"{DOCKERFILE}: differs"),
    "stray file": (f"images/{PLAIN}/x", b"", f"images/{PLAIN}/x: belongs to no cell"),
    "stray file in a folder": (f"images/{PLAIN}/d/x", b"", f"images/{PLAIN}/d: belongs to no cell"),
    "stray folder": ("images/gone/Dockerfile", b"", "images/gone: belongs to no cell"),
    "stray file beside": ("images/README", b"", "images/README: belongs to no cell"),
}


@pytest.mark.parametrize(("name", "content", "says"), CHANGES.values(), ids=CHANGES.keys())
def test_every_difference_is_seen_and_mended(tiny: Project, name: str, content: bytes | None, says: str) -> None:
    files = rendered(tiny)
    render.write(tiny.root, files)
    path = tiny.root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n") if content is None else content)
    with pytest.raises(StaleError) as caught:
        render.check(tiny.root, files)
    assert str(caught.value).splitlines()[1:] == [f"  {says}"]
    assert caught.value.hint == "Write it again: builder render"
    assert render.write(tiny.root, files) == [says.partition(":")[0]]
    render.check(tiny.root, files)
    found = {
        file.relative_to(tiny.root).as_posix(): file for file in (tiny.root / "images").rglob("*") if file.is_file()
    }
    assert {file: path.read_bytes().decode() for file, path in found.items()} == files


def test_a_link_in_images_is_removed_not_followed(tiny: Project) -> None:
    files = rendered(tiny)
    render.write(tiny.root, files)
    (tiny.root / "images/link").symlink_to(tiny.root / "templates")
    assert render.write(tiny.root, files) == ["images/link"]
    assert (tiny.root / "templates/Dockerfile.j2").exists()


def test_a_long_list_of_differences_is_cut(tiny: Project) -> None:
    files = {f"images/x/{number}": "" for number in range(100)}
    with pytest.raises(StaleError) as caught:
        render.check(tiny.root, files)
    assert len(str(caught.value).splitlines()) == 21
