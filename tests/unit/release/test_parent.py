"""What `builder add` must know is read from an image alone; what builder did not make is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.common.errors import VerifyError
from builder.release.image_sources import sources_in_registry
from builder.release.parent import Parent, read_parent
from tests.fakes.registry import MemoryRegistry
from tests.unit.layers.test_wheel import pack
from tests.unit.release.parents import FILES, SYSTEM, ParentImage, plain, project

SITE = "opt/venv/lib/python/site-packages"


@pytest.fixture
def image() -> ParentImage:
    return ParentImage(MemoryRegistry())


def parent_of(image: ParentImage) -> Parent:
    [source] = sources_in_registry(image.registry, image.push("1"), "amd64")
    return read_parent(source)


def test_what_resolving_needs_is_read_by_small_requests(image: ParentImage) -> None:
    parent = parent_of(image)
    assert {name: wheel.version for name, wheel in parent.packages.items()} == {"ember": "1.9", "tinylib": "1.9"}
    assert (parent.python, parent.arch, parent.glibc, parent.framework) == ("3.11", "amd64", "2.36", "ember 1.9")
    assert parent.constraints == ["ember==1.9"]
    assert parent.files["opt/venv/pyvenv.cfg"][1].size == len(SYSTEM["opt/venv/pyvenv.cfg"])
    largest = max(layer.size for _, layer in image.layers)
    assert all(int(call.split()[1]) < largest for call in image.registry.calls if call.startswith("read "))


def test_uv_gets_the_metadata_of_the_packages_of_the_parent(image: ParentImage) -> None:
    parent = parent_of(image)
    before = len(image.registry.calls)
    assert set(parent.installed) == {"ember", "tinylib"}
    assert len(image.registry.calls) == before, "only what uv asks for is read"
    installed = parent.installed["ember"]
    assert installed.metadata.startswith(b"Metadata-Version: 2.1\nName: ember\n")
    assert installed.wheel.file == "ember-1.9-py3-none-any.whl"
    assert "other" not in parent.installed


def test_a_higher_layer_has_the_file(image: ParentImage) -> None:
    image.layers.append(("files: other", image.layer(plain({"etc/pip/constraints.txt": b"ember<2\n"}))))
    assert parent_of(image).constraints == ["ember<2"]


@pytest.mark.parametrize("path", ["ember/__init__.py", "../../../../../usr/local/bin/start", "../../../pyvenv.cfg"])
def test_a_record_hides_no_file_of_others(image: ParentImage, path: str) -> None:
    """An old wheel may list any path: those of the framework, the launcher and the system stay."""
    record = {"RECORD": f"tinylib.py,,\n{path},,\n".encode()}
    evil = pack({"tinylib.py": b""}, name="tinylib-1.9-py3-none-any.whl", info="tinylib-1.9.dist-info", parts=record)
    image.layers[0] = image.wheels(project("ember"), evil)
    assert parent_of(image).own_paths(["tinylib"]) == {f"{SITE}/tinylib.py", f"{SITE}/tinylib-1.9.dist-info"}


@pytest.mark.parametrize("line", ["--index-url https://example.test", "x @ https://example.test/x.whl", "-e ."])
def test_constraints_that_are_no_requirements(image: ParentImage, line: str) -> None:
    image.layers[2] = "files", image.layer(plain({**FILES, "etc/pip/constraints.txt": line.encode()}))
    with pytest.raises(VerifyError, match=r"constraints\.txt of the image is invalid"):
        _ = parent_of(image).constraints


def test_a_system_without_a_c_library(image: ParentImage) -> None:
    image.layers[1] = "os", image.layer(plain({**SYSTEM, "var/lib/dpkg/status": b"Package: musl\n"}))
    with pytest.raises(VerifyError, match="no valid version of libc6"):
        _ = parent_of(image).glibc


def test_an_image_of_something_else(image: ParentImage) -> None:
    of_wheels = image.layers.pop(0)
    with pytest.raises(VerifyError, match="builder did not make the image") as caught:
        parent_of(image)
    assert "Dockerfile" in caught.value.hint

    image.layers.insert(0, of_wheels)
    del image.labels["io.github.gpu-images.python"]
    with pytest.raises(VerifyError, match="builder did not make the image"):
        parent_of(image)


def test_an_image_with_another_layer_format(image: ParentImage) -> None:
    image.layers[0] = image.layers[0][0].replace("format=6", "format=5"), image.layers[0][1]
    with pytest.raises(VerifyError, match="its layer format is 5, this builder's is 6"):
        parent_of(image)


def test_a_table_of_contents_that_the_manifest_does_not_name(image: ParentImage) -> None:
    """The registry could otherwise send any files."""
    name, layer = image.layers[2]
    image.layers[2] = name, replace(layer, toc="sha256:" + "5" * 64)
    with pytest.raises(VerifyError, match="its table of contents does not match the digest in the manifest"):
        _ = parent_of(image).files


@pytest.mark.parametrize("inner", [None, "text", {"Env": "PATH=/bin"}, {"Env": [1]}])
def test_a_configuration_of_something_else(image: ParentImage, inner: object) -> None:
    config = (
        {**(inner if isinstance(inner, dict) else {}), "Labels": image.labels} if isinstance(inner, dict) else inner
    )
    [source] = sources_in_registry(image.registry, image.push("1", config=config), "amd64")
    with pytest.raises(VerifyError):
        read_parent(source)
