"""The launcher of the images, as far as it is pure; the rest is tested in every image."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from builder import settings
from templates.base.files.usr.local.lib.workstation import gpus, hooks, launch, person, services, variables
from templates.base.files.usr.local.lib.workstation.gpus import Found, Gpu
from templates.base.files.usr.local.lib.workstation.refusal import CONFIG, UNAVAILABLE, Refusal
from templates.base.files.usr.local.lib.workstation.variables import Variable

ROOT = Path(__file__).resolve().parents[2]
A, B = Gpu("NVIDIA A", "GPU-aaaa-1", 80 * 2**30), Gpu("NVIDIA B", "GPU-aabb-2", 0)
CUDA = {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_REQUIRE_CUDA": "driver>=525.60.13"}


def every_variable() -> list[Variable]:
    files = sorted(ROOT.glob("templates/*/files/etc/variables.d/*.json"))
    return [Variable(**entry) for file in files for entry in json.loads(file.read_text())]


# ---- variables


def test_every_variable_has_a_known_kind_and_is_declared_once() -> None:
    known = every_variable()
    assert len({one.name for one in known}) == len(known) >= 10
    for one in known:
        variables._fault(one.kind, "1")


def test_documents_list_every_variable() -> None:
    text = (ROOT / "docs/workstation.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `")]
    told = {name.strip(" `"): (default.strip(), what.strip()) for name, default, what in rows}
    assert {one.name: (one.default, one.text) for one in every_variable()} == told


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("flag", ["0", "1", ""], ["yes", "true", "2", "1\n"]),
        ("port", ["1", "8888", "65535"], ["0", "65536", "-1", "8e3", " 80", "80\n", "\u0661"]),
        ("id", ["1", "1000", "4294967294"], ["0", "4294967295", "user", "", "1.0"]),
        ("group", ["0", "100"], ["-1", "users"]),
        ("size", ["8GB", "512 MiB", "1.5GiB"], ["8", "GB", "0GB", "8gb", "-1GB", "8GB\n"]),
        ("path", ["/workspace/runs"], ["runs", ""]),
        ("file", [str(ROOT / "Makefile")], [str(ROOT), "/nowhere/at/all", "Makefile"]),
    ],
)
def test_values_are_checked(kind: str, good: list[str], bad: list[str]) -> None:
    assert [value for value in good if variables._fault(kind, value)] == []
    assert [value for value in bad if not variables._fault(kind, value)] == []


def test_all_faults_are_told_at_once_and_secrets_are_not() -> None:
    known = [
        Variable("A_PORT", "port", "", ""),
        Variable("A_FLAG", "flag", "", ""),
        Variable("A_TOKEN", "secret", "", ""),
    ]
    with pytest.raises(Refusal) as refused:
        variables.check({"A_PORT": "x", "A_FLAG": "y", "A_TOKEN": "hidden"}, known)
    assert refused.value.status == CONFIG
    assert "A_PORT='x'" in str(refused.value)
    assert "A_FLAG='y'" in str(refused.value)
    assert "hidden" not in str(refused.value)


def test_a_name_that_is_almost_right_is_told() -> None:
    known = [Variable("JUPYTER_TOKEN", "secret", "", "")]
    assert variables.check({"JUPYTER_TOKN": "x"}, known) == [
        "JUPYTER_TOKN is not a variable of this image; did you mean JUPYTER_TOKEN?"
    ]
    assert variables.check({"JUPYTER_CONFIG_DIR": "x", "OTHER_TOKEN": "y"}, known) == []


@pytest.mark.parametrize(("text", "expected"), [("8GB", 8 * 10**9), ("512MiB", 2**29), ("1.5 GiB", 3 * 2**29)])
def test_sizes(text: str, expected: int) -> None:
    assert variables.size(text) == expected


# ---- as whom


@pytest.mark.parametrize(
    ("environ", "uid", "serving", "owner", "expected"),
    [
        ({}, 1000, True, 1000, None),
        ({}, 123456, False, 1000, None),
        ({}, 0, False, 4242, None),
        ({}, 0, True, 4242, (4242, 0)),
        ({}, 0, True, 0, (1000, 0)),
        ({"NB_UID": "7"}, 0, False, 4242, (7, 0)),
        ({"NB_UID": "7", "NB_GID": "8"}, 0, True, 4242, (7, 8)),
        ({"NB_GID": "8"}, 0, False, 4242, (4242, 8)),
        ({"NB_UID": "1000"}, 1000, True, 4242, None),
    ],
)
def test_who_is_to_be(
    environ: dict[str, str], uid: int, serving: bool, owner: int, expected: tuple[int, int] | None
) -> None:
    assert person.wanted(environ, uid=uid, serving=serving, owner=owner) == expected


def test_another_user_needs_root() -> None:
    with pytest.raises(Refusal, match="add `--user root`"):
        person.wanted({"NB_UID": "7"}, uid=1000, serving=True, owner=1000)


def test_the_image_user_gets_the_numbers_and_is_found_first(tmp_path: Path) -> None:
    file = tmp_path / "passwd"
    file.write_text("root:x:0:0::/root:/bin/bash\nother:x:33:33::/:/bin/sh\nuser:x:1000:0::/home/user:/bin/bash\n")
    person._rename(file, "user", {2: "33", 3: "8"})
    assert file.read_text() == (
        "user:x:33:8::/home/user:/bin/bash\nroot:x:0:0::/root:/bin/bash\nother:x:33:33::/:/bin/sh\n"
    )
    groups = tmp_path / "group"
    groups.write_text("root:x:0:\n")
    person._rename(groups, "user", {2: "8"}, new="user:x:8:")
    assert groups.read_text() == "user:x:8:\nroot:x:0:\n"


def test_login_shells_have_the_path_of_the_image() -> None:
    text = (ROOT / "templates/base/files/etc/profile.d/10-venv.sh").read_text()
    assert f'PATH="{settings.PATH}"' in text


# ---- GPUs


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        (None, (A, B)),
        ("0", (A,)),
        ("1,0", (B, A)),
        ("GPU-aaaa", (A,)),
        ("GPU-aa", ()),
        ("1,7,0", (B,)),
        ("-1", ()),
        ("", ()),
        ("0,0", ()),
        ("\u00b2", ()),
        ("MIG-1234", (Gpu("a slice of a GPU", "MIG-1234", 0),)),
    ],
)
def test_cuda_visible_devices_is_respected(chosen: str | None, expected: tuple[Gpu, ...]) -> None:
    environ = {} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}
    assert gpus.visible((A, B), environ) == expected


def test_a_gpu_is_told_in_a_line() -> None:
    lines, warnings = gpus.tell(Found("570.86.10", "12.8", (A, B)), CUDA)
    assert lines == [
        "GPU 0: NVIDIA A, 80 GiB, driver 570.86.10, CUDA up to 12.8",
        "GPU 1: NVIDIA B, driver 570.86.10, CUDA up to 12.8",
    ]
    assert warnings == []


def test_hidden_gpus_are_told() -> None:
    lines, _ = gpus.tell(Found("570.86.10", "12.8", (A, B)), {**CUDA, "CUDA_VISIBLE_DEVICES": "1"})
    assert lines == ["GPU 0: NVIDIA B, driver 570.86.10, CUDA up to 12.8", "CUDA_VISIBLE_DEVICES hides 1 more"]


@pytest.mark.parametrize(
    ("found", "environ", "told"),
    [
        (Found(), {}, "docker run --gpus all"),
        (Found(trouble="Driver Not Loaded"), {}, "does not answer: Driver Not Loaded"),
        (Found("570.1", "12.8"), {}, "The driver 570.1 sees none"),
        (Found("570.1", "12.8", (A,)), {"CUDA_VISIBLE_DEVICES": "3"}, "CUDA_VISIBLE_DEVICES='3' hides all 1"),
        (
            Found("525.60.12", "12.0", (A,)),
            {},
            "driver 525.60.12 is too old for the CUDA of this image, which needs 525.60.13",
        ),
    ],
)
def test_what_keeps_a_gpu_away_is_one_warning_or_the_end(found: Found, environ: dict[str, str], told: str) -> None:
    _, warnings = gpus.tell(found, {**CUDA, **environ})
    assert len(warnings) == 1
    assert told in warnings[0]
    with pytest.raises(Refusal) as refused:
        gpus.tell(found, {**CUDA, **environ, "GPU_REQUIRED": "1"})
    assert refused.value.status == UNAVAILABLE
    assert told in str(refused.value)


def test_drivers_are_compared_as_versions() -> None:
    assert gpus.tell(Found("1000.1", "99.0", (A,)), CUDA)[1] == []


def test_an_image_for_the_cpu_does_not_warn() -> None:
    assert gpus.tell(Found(), {}) == (["no GPU: this image is for the CPU"], [])
    with pytest.raises(Refusal, match="for the CPU alone"):
        gpus.tell(Found(), {"GPU_REQUIRED": "1"})


# ---- the rest


def test_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(size: int) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, size // 4096, 0, 0, 0, 0, 0, 0, 255))

    monkeypatch.setattr(os, "statvfs", lambda path: of(64 * 2**20))
    assert launch.shm_warning().startswith("/dev/shm has 64 MB")
    monkeypatch.setattr(os, "statvfs", lambda path: of(2**30))
    assert launch.shm_warning() == ""


def test_only_folders_with_a_program_are_services(tmp_path: Path) -> None:
    for name in ("b", "a", "none"):
        (tmp_path / name).mkdir()
    for name in ("a", "b"):
        (tmp_path / name / "run").touch()
    assert [path.name for path in services.present(tmp_path)] == ["a", "b"]
    assert services.present(tmp_path / "absent") == []


def test_no_hooks_change_nothing(tmp_path: Path) -> None:
    environ = {"A": "b"}
    hooks.run(environ, tmp_path / "absent")
    assert environ == {"A": "b"}


def test_every_service_is_whole() -> None:
    """Each declares how it is checked and reached, and its programs can be run."""
    folders = sorted(ROOT.glob("templates/*/files/etc/services.d/*"))
    assert [folder.name for folder in folders] == ["jupyter", "ssh"]
    for folder in folders:
        programs = {path.name for path in folder.iterdir() if os.access(path, os.X_OK)}
        assert programs == {"prepare", "run", "check", "ready"}, folder


def test_the_sitecustomize_knows_the_sizes_of_the_launcher() -> None:
    text = (ROOT / "templates/base/files/usr/local/lib/gpu-memory-limit/sitecustomize.py").read_text()
    assert all(f'"{unit}"' in text for unit in variables._UNITS)
