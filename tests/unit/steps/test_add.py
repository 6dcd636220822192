"""Packages are put on an image: its own packages and files stay, and only the new layers are sent."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.errors import (
    BuilderError,
    FetchError,
    ImageTestError,
    LockError,
    RefusedError,
    UsageError,
    VerifyError,
)
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.evidence import reports, signing
from builder.evidence.results import Evidence
from builder.evidence.signing import Trust
from builder.index.download import Fetcher
from builder.layers.store import Store
from builder.matrix import facts
from builder.matrix.schema import Trusted
from builder.registry import artifacts
from builder.release.additions import Addition
from builder.steps.add import IMPORTS
from tests.unit.layers.test_wheel import Wheel
from tests.unit.release.parents import ParentImage, plain, project
from tests.unit.steps.adding import LOCAL, PARENT, TARGET, Bench, ImportingEngine, RecordingSigner, addition, locked

OURS = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd())
LABEL = "io.github.gpu-images"
TINY = "opt/venv/lib/python/site-packages/tinylib"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench.install(tmp_path / "store", monkeypatch)


def test_only_the_new_layer_is_sent(bench: Bench) -> None:
    bench.add()
    [target, packages, constraints, _] = bench.uv.calls[0]
    assert (target.python, target.arch, target.glibc) == ("3.11", "amd64", "2.36")
    assert (set(target.installed), set(target.held)) == ({"ember", "tinylib"}, {"ember"}), "what the constraints name"
    assert (packages, constraints) == (["einops"], ["ember==1.9"])

    uploads = [call for call in bench.target.calls if call.startswith("upload")]
    assert len(uploads) == 2, "the layer and the configuration"
    assert bench.target.calls[-1] == "put 1", "the tag is last"
    assert bench.shown[1:3] == ["resolve: einops 0.8", "resolve: 1 new, 0 moved, 2 kept, ember 1.9 unchanged"]
    assert bench.shown[-1].startswith(f"pushed: {TARGET}@{bench.target.tags['1']}")
    assert bench.shown[-1].endswith(f"{size(sum(layer.size for _, layer in bench.parent.layers))} mounted")
    assert list(bench.store.downloads.iterdir()) == []


def test_layers_that_cannot_be_mounted_pass_this_machine(bench: Bench) -> None:
    bench.target.others = {}
    bench.add()
    assert "mounted" not in bench.shown[-1]
    assert all(layer.digest in bench.target.contents for _, layer in bench.parent.layers)


def test_the_configuration_says_what_the_image_is(bench: Bench) -> None:
    bench.add(addition("einops", env={"LANG": "de_DE.UTF-8", "TEAM": "vision"}))
    config = bench.config()
    parent = bench.parent.registry.tags["1"]
    labels = config["config"].pop("Labels")
    assert config["config"] == {"User": "1000:0", "Env": ["PATH=/usr/bin", "LANG=de_DE.UTF-8", "TEAM=vision"]}
    assert config["rootfs"]["diff_ids"][:-1] == [layer.diff_id for _, layer in bench.parent.layers]
    [line] = bench.history()
    assert line.startswith("wheels format=6 python=3.11: einops-0.8-py3-none-any.whl@")
    assert labels[f"{LABEL}.parent"] == labels["org.opencontainers.image.base.digest"] == parent
    assert labels["org.opencontainers.image.base.name"] == str(PARENT)
    assert labels[f"{LABEL}.parent.cell"] == "em-1-cpu-py311"
    assert labels[f"{LABEL}.cuda"] == "cpu", "GPU checks need it"
    assert not {f"{LABEL}.cell", f"{LABEL}.plan", "org.opencontainers.image.title"} & labels.keys()
    request = {"requirements": ["einops"], "env": {"LANG": "de_DE.UTF-8", "TEAM": "vision"}}
    assert json.loads(labels[f"{LABEL}.added"]) == request


def test_the_same_request_gives_the_same_bytes(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, used = bench.add(), bench.store
    bench.store = Store(tmp_path / "other")
    assert bench.add() == first
    bench.store = used
    monkeypatch.setattr(Fetcher, "fetch", lambda *_: pytest.fail("downloaded, though the store has the layer"))
    assert bench.add() == first


def test_the_image_is_a_parent_itself(bench: Bench) -> None:
    bench.add()
    child = bench.child()
    assert sorted(child.packages) == ["einops", "ember", "tinylib"]
    assert child.installed["einops"].metadata.startswith(b"Metadata-Version")

    bench.offer(project("tqdm", version="4"))
    bench.add(addition("tqdm", parent=TARGET, target=replace(TARGET, tag="2")))
    assert len(bench.history("2")) == 2
    assert bench.config("2")["config"]["Labels"][f"{LABEL}.parent.cell"] == "em-1-cpu-py311"


def test_a_parent_for_several_architectures(bench: Bench) -> None:
    first = bench.parent.push()
    bench.parent.arch = "arm64"
    index = bench.parent.registry.add_index(amd64=first, arm64=bench.parent.push())
    bench.parent.registry.tags["1"] = index
    bench.add()
    manifest = bench.target.manifest("1")
    assert manifest
    entries = json.loads(manifest.content)["manifests"]
    assert [entry["platform"]["architecture"] for entry in entries] == ["amd64", "arm64"]
    assert all(entry["digest"] in bench.target.contents for entry in entries)

    bench.uv.calls.clear()
    bench.add(arch="arm64")
    assert {target.arch for target, *_ in bench.uv.calls} == {"arm64"}


def test_a_parent_for_another_architecture_is_refused(bench: Bench) -> None:
    with pytest.raises(UsageError, match=f"^{PARENT} is for amd64, not arm64$"):
        bench.add(arch="arm64")


def test_a_dry_run_changes_nothing(bench: Bench) -> None:
    assert bench.add(dry_run=True) == {}
    assert (bench.target.calls, bench.shown[-1][:8]) == ([], "resolve:")


def test_a_tag_with_a_date_never_moves(bench: Bench) -> None:
    target = replace(TARGET, tag="1-20261127")
    bench.add(addition("einops", target=target))
    bench.add(addition("einops", target=target))
    with pytest.raises(RefusedError):
        bench.add(addition("einops", target=target, env={"A": "b"}))


# ---- packages of the parent


def test_a_package_of_the_parent_moves_and_its_files_are_hidden(bench: Bench) -> None:
    """Its bytecode too: Python would load that of the old version."""
    bytecode = {f"{TINY}/__pycache__/__init__.cpython-311.pyc": b"old", f"{TINY}/made.by.a.person": b""}
    bench.parent.layers.append(("files: ember bytecode", bench.parent.layer(plain(bytecode))))
    bench.push_parent()
    bench.offer(project("einops", version="0.8"), project("tinylib", {"tinylib/new.py": b""}, version="1.8"))
    bench.add()
    assert bench.shown[1:4] == [
        "resolve: einops 0.8",
        "resolve: tinylib 1.9 -> 1.8",
        "resolve: 1 new, 1 moved, 1 kept, ember 1.9 unchanged",
    ]
    assert bench.history()[0] == "files: replaced packages"
    child = bench.child()
    assert child.packages["tinylib"].version == "1.8"
    assert b"Version: 1.8" in child.installed["tinylib"].metadata
    below = sorted(path for path in child.files if path.startswith(TINY) and child.files[path][1].type != "dir")
    assert [path.removeprefix(TINY) for path in below] == [
        *(f"-1.8.dist-info/{name}" for name in ("INSTALLER", "METADATA", "RECORD", "REQUESTED", "WHEEL")),
        "/made.by.a.person",
        "/new.py",
    ]
    assert f"{TINY}-1.9.dist-info" not in child.files, "importlib.metadata would find it"


def test_another_package_of_the_parent_may_have_to_move_too(bench: Bench) -> None:
    bench.offer(project("einops", version="0.8"), project("tinylib", version="1.8"))
    bench.uv.conflicts = ["ember"]  # of the rest of the parent
    with pytest.raises(LockError):
        bench.add()
    packages = [packages for _, packages, _, _ in bench.uv.calls]
    assert packages == [["einops"], ["einops==0.8", "tinylib==1.8", "ember"], ["einops", "ember", "tinylib"]]
    assert bench.uv.calls[1][0].held == {"ember"}
    assert bench.uv.calls[2][2] == ["ember==1.9", "einops==0.8"], "the requested package stays"


def test_all_packages_can_be_kept(bench: Bench) -> None:
    bench.add(addition("einops", keep=True))
    assert bench.uv.calls[0][0].held == {"ember", "tinylib"}
    assert bench.repeat().request.keep


DAYS = {"0.8": "2026-01-26", "0.9": "2026-05-01"}
CHOICES = [
    ("einops", DAYS, "einops 0.8 (2026-01-26; the newest, 0.9, needs ember 3.0)"),
    ("einops<0.9", DAYS, "einops 0.8 (2026-01-26; the newest is 0.9)"),
    ("einops", {"0.8": "2026-01-26"}, "einops 0.8 (2026-01-26)"),
    ("einops", {"0.8": "2026-01-26", "0.9rc1": "2026-05-01"}, "einops 0.8 (2026-01-26)"),
    ("einops", DAYS | {"0.8": ""}, "einops 0.8 (the newest, 0.9, needs ember 3.0)"),
    ("einops==0.8", DAYS | {"0.8": "2023-11-19"}, "einops 0.8 (2023-11-19; the newest is 0.9)"),
    ("einops<2", DAYS | {"0.8": "2023-11-19"}, "einops 0.8 (2023-11-19; the newest, 0.9, needs ember 3.0)"),
]


@pytest.mark.parametrize(("requested", "page", "line"), CHOICES)
def test_a_requested_package_has_its_day_and_what_keeps_it_back(
    bench: Bench, requested: str, page: dict[str, str], line: str
) -> None:
    bench.uv.pages = {"einops": page}
    bench.add(addition(requested), dry_run=True)
    assert bench.shown[1] == f"resolve: {line}"


@pytest.mark.parametrize("requested", ["einops", "einops>=0.5"])
def test_a_version_of_years_ago_is_not_chosen_without_a_word(bench: Bench, requested: str) -> None:
    """vLLM 0.2.2 of 2023 was, as the numpy of the parent did not fit a newer one."""
    bench.uv.pages = {"einops": DAYS | {"0.8": "2023-11-19"}}
    message = r"einops 0\.8 is more than a year older .* 0\.9, needs ember 3\.0"
    with pytest.raises(RefusedError, match=message) as caught:
        bench.add(addition(requested), dry_run=True)
    assert "einops==0.8" in caught.value.hint


# ---- indexes


def test_the_index_of_a_request(bench: Bench, tmp_path: Path) -> None:
    """Only what it has comes from there, and it is never replaced by the default index."""
    (tmp_path / "own-wheels").mkdir()
    bench.uv.pages = {"einops": {"0.8": ""}}
    bench.add(addition("einops", "other", index=f"{tmp_path}/own-wheels"))
    target, packages, _, _ = bench.uv.calls[0]
    assert (packages, set(target.indexes)) == (["einops", "other"], {"einops"})
    assert str(tmp_path) not in json.dumps(bench.config())
    again = bench.repeat()
    assert again.request.index == "./own-wheels"
    with pytest.raises(UsageError, match=r"no index '\./own-wheels'"):
        bench.add(again)
    bench.uv.pages = {}
    with pytest.raises(UsageError, match="has none of einops"):
        bench.add(addition("einops", "other", index=str(tmp_path)))


@pytest.mark.parametrize(
    "index",
    [
        "none",
        "HTTPS://x.test?SECRET",
        "https://me:SECRET@x.test/simple",
        "https://x.test/simple?token=SECRET",
        "https://x.test/simple#SECRET",
    ],
)
def test_an_index_that_is_refused(bench: Bench, index: str) -> None:
    with pytest.raises(UsageError, match="index") as caught:
        bench.add(addition("einops", index=index))
    assert "SECRET" not in str(caught.value), "an image, and the log of a job, can be read by others"


def test_another_file_of_a_version_of_the_parent_is_taken(bench: Bench) -> None:
    rebuilt = project("tinylib", {"tinylib/new.py": b""})
    bench.uv.pages = {"tinylib": {"1.9": ""}}
    bench.offer(rebuilt)
    bench.add(addition("tinylib", index="."))
    assert locked(rebuilt).sha256 in bench.history()[-1]
    assert "resolve: tinylib 1.9 (another file)" in bench.shown
    (first, *_), (second, packages, *_) = bench.uv.calls
    assert ("tinylib" in first.installed, second.held, packages) == (False, {"ember"}, ["tinylib==1.9", "ember"])


@pytest.mark.parametrize(("requested", "keep"), [("ember", False), ("tinylib", True)])
def test_another_file_of_a_package_that_stays_is_refused(bench: Bench, requested: str, keep: bool) -> None:
    bench.uv.pages = {"tinylib": {"1.9": ""}, "ember": {"1.9": ""}}
    with pytest.raises(RefusedError, match=r"another (tinylib|ember)-1\.9-py3-none-any\.whl is requested"):
        bench.add(addition(requested, index=".", keep=keep))


# ---- what does not fit


def cuda_wheel(name: str) -> Wheel:
    """A wheel of NVIDIA for every Python."""
    file = name.replace("-", "_")
    return replace(project(file, version="1"), name=f"{file}-1-py3-none-manylinux_2_17_x86_64.whl")


FOLDER = "/opt/venv/lib/python/site-packages/ember/__init"
EINOPS = addition("einops")
OFFERS: list[tuple[dict[str, bytes], type[BuilderError], str]] = [
    ({"ember/__init__.py": b"evil\n"}, RefusedError, f"have different files for {FOLDER}"),
    ({"einops-0.8.data/data/pyvenv.cfg": b"home = /tmp\n"}, RefusedError, "different files for /opt/venv/pyvenv.cfg"),
    ({"einops-0.8.data/scripts/python": b"#!python\n"}, RefusedError, "different files for /opt/venv/bin/python"),
    ({"einops-0.8.data/data/bin": b"a file"}, RefusedError, "/opt/venv/bin is a folder in the parent"),
    ({"../../../../../usr/local/bin/start": b"evil\n"}, FetchError, "invalid path"),
]
CUDAS = [
    ("cpu", "nvidia-cublas-cu12", "not for the CPU, as the parent is: nvidia-cublas-cu12"),
    ("12.8", "nvidia-cublas-cu13", "not for CUDA 12, as the parent is: nvidia-cublas-cu13"),
    ("12.8", "nvidia-cublas", "not for CUDA 12, as the parent is: nvidia-cublas"),
    ("13.0", "nvidia-cublas-cu12", "not for CUDA 13, as the parent is: nvidia-cublas-cu12"),
]
HASH = f"--hash=sha256:{'1' * 64}"
HASHES = [
    (project("einops", version="0.8"), f"einops {HASH}", "does not have one of its hashes"),
    (project("tinylib"), f"tinylib {HASH}", "tinylib-1.9-py3-none-any.whl"),
]
REFUSED: list[tuple[str, Wheel, Addition, type[BuilderError], str]] = [
    *(("cpu", project("einops", files, version="0.8"), EINOPS, kind, message) for files, kind, message in OFFERS),
    *((cuda, cuda_wheel(name), EINOPS, RefusedError, message) for cuda, name, message in CUDAS),
    *(("cpu", wheel, addition(requested), LockError, message) for wheel, requested, message in HASHES),
]


@pytest.mark.parametrize(("cuda", "wheel", "given", "kind", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(
    bench: Bench, cuda: str, wheel: Wheel, given: Addition, kind: type[BuilderError], message: str
) -> None:
    bench.parent.labels[f"{LABEL}.cuda"] = cuda
    bench.push_parent()
    bench.offer(wheel)
    with pytest.raises(kind, match=re.escape(message)):
        bench.add(given)
    assert bench.target.calls == []


def test_an_equal_file_may_be_in_both(bench: Bench) -> None:
    bench.offer(project("einops", {"ember/__init__.py": b"ember = 1\n"}, version="0.8"))
    bench.add()
    assert "1" in bench.target.tags


def test_libraries_of_the_same_cuda_are_a_layer_for_every_python(bench: Bench) -> None:
    bench.parent.labels[f"{LABEL}.cuda"] = "12.8"
    bench.push_parent()
    bench.offer(cuda_wheel("nvidia-nvshmem-cu12"), project("einops", version="0.8"))
    bench.add()
    kinds = [line.partition(":")[0] for line in bench.history()]
    assert kinds == ["wheels format=6 python=none", "wheels format=6 python=3.11"]


def test_a_known_conflict(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def violations(_: object, versions: Mapping[str, str]) -> list[str]:
        return ["einops needs another ember"] if "einops" in versions else ["of the parent alone"]

    monkeypatch.setattr(facts.Facts, "violations", violations)
    with pytest.raises(RefusedError, match="einops needs another ember"):
        bench.add()


# ---- again


def test_the_same_additions_on_the_next_release(bench: Bench) -> None:
    first = addition("einops>=0.7", env={"TEAM": "vision"})
    bench.add(first)
    bench.parent.layers[0] = bench.parent.wheels(project("ember", version="1.10"), project("tinylib"))
    bench.push_parent()
    bench.uv.calls.clear()
    again = bench.repeat()
    assert (again.parent, again.request) == (PARENT, first.request)
    bench.add(again)

    [(_, _, _, preferred), (_, packages, _, _)] = bench.uv.calls
    assert preferred == {"einops": "0.8", "ember": "1.10", "tinylib": "1.9"}, "what was chosen before, where it fits"
    assert packages == ["einops==0.8"], "what uv chose"
    assert bench.config()["config"]["Labels"][f"{LABEL}.parent"] == bench.parent.registry.tags["1"]
    assert "resolve: ember 1.9 -> 1.10" in bench.shown


def test_an_image_whose_parent_is_the_same_stays(bench: Bench) -> None:
    bench.add()
    again, calls = bench.repeat(), list(bench.target.calls)
    assert bench.add(again) == {}
    assert not [call for call in bench.target.calls[len(calls) :] if call.startswith(("put", "upload"))]
    assert bench.shown[-1] == f"parent: {PARENT} is still the same: {TARGET} is up to date"


BASE = "org.opencontainers.image.base.name"
RECORDS = [
    (f"{LABEL}.added", "", f"^{TARGET} was not made by `builder add`$"),
    (f"{LABEL}.added", "{", f"invalid label {LABEL}.added"),
    (f"{LABEL}.added", '{"requirements": ["-e ."]}', "the option -e is not supported"),
    (f"{LABEL}.added", '{"requirements": [], "apt": ["tmux"]}', f"invalid label {LABEL}.added"),
    (f"{LABEL}.added", '{"requirements": [], "env": {"PATH": "/tmp"}}', "every image sets PATH"),
    (BASE, "NO NAME", f"invalid label {BASE}"),
    (BASE, f"a/b@sha256:{'1' * 64}", "was put on a digest"),
]


@pytest.mark.parametrize(("name", "value", "message"), RECORDS)
def test_a_record_that_cannot_be_repeated(bench: Bench, name: str, value: str, message: str) -> None:
    child = ParentImage(bench.target)
    child.labels |= {f"{LABEL}.added": '{"requirements": ["einops"]}', BASE: str(PARENT), name: value}
    child.push("1")
    with pytest.raises(BuilderError, match=message):
        bench.repeat()


# ---- in an engine


def test_results_are_attached_before_the_tag_is_set(bench: Bench) -> None:
    engine = ImportingEngine()
    digest = bench.add(engine=engine)[TARGET]
    assert engine.commands[0][-1] == "einops"
    assert "tests: 1 module imported, pip check passed (amd64)" in bench.shown
    assert engine.calls[0] == "sweep", "what a killed builder left"
    assert engine.calls[-1].startswith("remove "), "the engine keeps nothing"
    [artifact] = artifacts.attached(bench.target, digest, reports.TYPE)
    documents = artifacts.read_artifact(bench.target, artifact, reports.TYPE, digest)
    assert documents
    evidence = Evidence.model_validate_json(documents[reports.TYPE])
    assert (evidence.kind, evidence.image) == ("image", digest)
    assert evidence.passed == ("import einops", "pip check")
    assert evidence.gpu_state == "not run (the image is for the CPU)"
    assert bench.target.calls[-1] == "put 1"


@pytest.mark.parametrize("target", [TARGET, LOCAL])
@pytest.mark.parametrize(
    ("errors", "conflicts", "message"),
    [
        ("Traceback\nImportError: no libx.so", "", r"cannot be imported\n.*\nImportError: no libx\.so"),
        ("", "einops 0.8 requires torch, which is not installed.\n", r"pip check failed\n.*einops 0\.8 requires torch"),
    ],
)
def test_nothing_is_pushed_or_kept_if_a_test_fails(
    bench: Bench, errors: str, conflicts: str, message: str, target: ImageRef
) -> None:
    engine = ImportingEngine(errors, conflicts)
    with pytest.raises(ImageTestError, match=message):
        bench.add(addition("einops", target=target), engine=engine)
    assert bench.target.calls == []
    assert engine.calls[-1].startswith("remove ")
    assert str(LOCAL) not in bench.store.images()


def test_an_image_without_a_registry_stays_in_the_engine_and_can_be_a_parent(bench: Bench) -> None:
    engine = ImportingEngine()
    digests = bench.add(addition("einops", target=LOCAL), engine=engine)
    assert engine.calls[-1] == "tag vision:1"
    assert digests == {LOCAL: bench.store.images()["vision:1"].digest}
    assert bench.target.calls == [], "nothing is pushed"

    with pytest.raises(UsageError, match="images of the store are not signed"):
        bench.add(addition("einops", parent=LOCAL), trust=OURS)
    bench.offer(project("tqdm", version="4"))
    bench.target.others = {}
    bench.add(addition("tqdm", parent=LOCAL))
    assert bench.shown[-1].endswith("sent"), "nothing is mounted"
    assert bench.config()["config"]["Labels"][BASE] == "vision:1"


def test_the_program_that_imports(tmp_path: Path, programs: None) -> None:
    """It runs in the image, for the names of projects."""
    (tmp_path / "site").mkdir()
    contents = {"einops/__init__.py": b"", "single.py": b"", "tests/__init__.py": b"1/0", "not-a-module.py": b"1/0"}
    spaced = {"space/one/__init__.py": b"", "space/one/deep/__init__.py": b"1/0"}
    greeting = project("greeting", {"greeting.py": b"print('Hello')"})
    for packed in (
        project("einops", contents),
        project("spaced", spaced),
        project("broken", {"broken.py": b"1/0"}),
        greeting,
    ):
        with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
            archive.extractall(tmp_path / "site")

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IMPORTS, *names]
        environ = {"PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    assert run("greeting").stdout.split() == ["greeting"], "without what it prints"
    assert run("einops", "spaced").stdout.split() == ["einops", "single", "space.one"]
    assert "ZeroDivisionError" in run("broken").stderr


# ---- signed


def test_statements_name_packages_and_parent(bench: Bench) -> None:
    bench.uv.pages, signer = {"einops": {"0.8": ""}}, RecordingSigner(key="k")
    asked = addition("einops", env={"TEAM": "secret", "A": "b"}, index="https://git.test/TOKEN")
    digest = bench.add(asked, signer=signer)[TARGET]
    [(signed, annotations, statements)] = signer.signed
    statement, sbom = json.loads(statements["slsaprovenance1"]), json.loads(statements["cyclonedx"])
    assert (signed, bench.target.tags["1"]) == (digest, digest)
    assert annotations == {"cell": "", "image": "vision", "tag": "1"}, "nobody can offer it under another name"
    stated = statement["buildDefinition"]["externalParameters"]["request"]
    assert stated == {"requirements": ["einops"], "env": ["A", "TEAM"]}, "a public log may show it"
    assert "TEAM=secret" in bench.config()["config"]["Env"]
    dependencies = statement["buildDefinition"]["resolvedDependencies"]
    parent = bench.parent.registry.tags["1"].removeprefix("sha256:")
    assert dependencies[0] == {"uri": f"oci:{PARENT.name}", "digest": {"sha256": parent}}
    assert dependencies[1]["uri"] == "pkg:pypi/einops@0.8"
    components = {component["purl"]: component for component in sbom["components"]}
    assert sorted(components) == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?distro=debian-&upstream=glibc",
        "pkg:pypi/einops@0.8",
        "pkg:pypi/ember@1.9",
        "pkg:pypi/tinylib@1.9",
    ]
    assert "properties" not in components["pkg:pypi/ember@1.9"], "its index is not known"
    assert sbom["metadata"]["component"]["version"] == digest


@pytest.mark.parametrize(
    ("signer", "notes", "message"),
    [
        ("", [], "no trusted signer signed it as cell 'em-1-cpu-py311' of em"),
        ("k.pub", [{"tag": "2"}], "signed for 2, not for 1"),
        ("k.pub", [{"tag": "1"}], ""),
    ],
)
def test_the_signature_of_the_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, signer: str, notes: list[dict[str, str]], message: str
) -> None:
    monkeypatch.setattr(signing, "signer_of_manifest", lambda *_: (signer, notes))
    monkeypatch.setattr(signing, "statements_of_image", lambda *_: [])
    if not message:
        bench.add(trust=OURS)
        assert "signature checked, tests: no statement of a trusted signer" in bench.shown[0]
        return
    with pytest.raises(VerifyError, match=message):
        bench.add(trust=OURS)
    assert bench.uv.calls == [], "nothing else is done with it"


def test_the_earlier_image_must_be_signed_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label has the whole request: whoever can push the tag would choose what the job signs."""
    bench.add()
    monkeypatch.setattr(signing, "signer_of_manifest", lambda *_: ("", []))
    with pytest.raises(VerifyError, match=f"{TARGET}: no trusted signer signed it"):
        bench.repeat(OURS)
