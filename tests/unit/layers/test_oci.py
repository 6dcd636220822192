"""Configuration and manifest, byte for byte, and the history, from which an image can be rebuilt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from builder.index.wheels import Wheel
from builder.layers import oci
from builder.layers.oci import Descriptor, Layer, LayerWheels
from builder.plan import layer_order
from builder.plan.layer_order import PlannedLayer
from builder.plan.settings import Health, Settings
from tests.unit.plan.test_layer_order import wheel

PLAIN = Settings(env={"B": "é", "A": "1"}, ports=(), command=("bash",), labels={"z": "1", "a": "2"})


def planned(kind: str, name: str, *wheels: Wheel, python: str = "3.11") -> PlannedLayer:
    return PlannedLayer(
        kind=kind,  # type: ignore[arg-type]
        name=name,
        component="base",
        inputs="sha256:inputs",
        wheels=wheels,
        python=python,
    )


def built(number: int) -> Layer:
    return Layer(digest=f"sha256:blob{number}", diff_id=f"sha256:diff{number}", size=number)


ONE, TWO = wheel("python", "one"), wheel("python", "two")
LAYERS = [built(1), built(2)]
HISTORY = [oci.history_line(planned("wheels", "python", ONE, TWO)), oci.history_line(planned("os", "os"))]


def test_a_configuration_byte_for_byte() -> None:
    """The order of keys matters here, unlike in JSON: the digest is of the bytes. A later label overrides."""
    config = oci.config(PLAIN, LAYERS, HISTORY, created="2026-01-02T03:04:05Z", labels={"z": "2", "base": "debian"})
    assert config == (
        b'{"architecture":"amd64","os":"linux","created":"2026-01-02T03:04:05Z","config":{"User":"1000:0",'
        b'"Env":["B=\\u00e9","A=1"],"Entrypoint":["/usr/bin/tini","-s","-g","--","/usr/local/bin/start"],"Cmd":["bash"],'
        b'"WorkingDir":"/workspace",'
        b'"Labels":{"z":"2","a":"2","base":"debian"}},'
        b'"rootfs":{"type":"layers","diff_ids":["sha256:diff1","sha256:diff2"]},"history":['
        b'{"created":"2026-01-02T03:04:05Z","created_by":"wheels format='
        + str(layer_order.LAYER_FORMAT).encode()
        + b" python=3.11: "
        b"one-1-py3-none-any.whl@sha256:" + ONE.sha256.encode() + b" "
        b"two-1-py3-none-any.whl@sha256:" + TWO.sha256.encode() + b'"},'
        b'{"created":"2026-01-02T03:04:05Z","created_by":"os"}]}'
    )


def test_ports_and_the_health_check_are_as_docker_expects_them() -> None:
    """Docker counts in nanoseconds."""
    settings = Settings(
        env={}, ports=(8888, 6006), command=("x",), labels={}, health=Health(command=("check", "it"), interval=7)
    )
    config = json.loads(oci.config(settings, (), (), created="", labels={}))["config"]
    assert config["ExposedPorts"] == {"8888/tcp": {}, "6006/tcp": {}}
    assert config["Healthcheck"] == {
        "Test": ["CMD", "check", "it"],
        "Interval": 7_000_000_000,
        "Timeout": 10_000_000_000,
        "StartPeriod": 60_000_000_000,
        "StartInterval": 1_000_000_000,
        "Retries": 3,
    }


def test_a_manifest_byte_for_byte() -> None:
    config = Descriptor(media_type="application/vnd.oci.image.config.v1+json", digest="sha256:config", size=7)
    assert oci.manifest(config, LAYERS) == (
        b'{"schemaVersion":2,"mediaType":"application/vnd.oci.image.manifest.v1+json",'
        b'"config":{"mediaType":"application/vnd.oci.image.config.v1+json","digest":"sha256:config","size":7},'
        b'"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:blob1","size":1},'
        b'{"mediaType":"application/vnd.oci.image.layer.v1.tar+gzip","digest":"sha256:blob2","size":2}]}'
    )


def test_the_configuration_of_a_temporary_image() -> None:
    assert b'"architecture":"arm64"' in oci.bare_config(LAYERS, {}, "arm64")
    assert b'"architecture":"arm64"' in oci.config(replace(PLAIN, arch="arm64"), LAYERS, HISTORY, created="", labels={})
    assert oci.bare_config(LAYERS, {"a": "1"}) == (
        b'{"architecture":"amd64","os":"linux","config":{"Labels":{"a":"1"}},'
        b'"rootfs":{"type":"layers","diff_ids":["sha256:diff1","sha256:diff2"]}}'
    )


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (planned("os", "os"), "os"),
        (planned("files", "files"), "files"),
        (planned("files", "ember bytecode"), "files: ember bytecode"),
        (
            planned("wheels", "cuda", ONE, python=""),
            f"wheels format={layer_order.LAYER_FORMAT} python=none: one-1-py3-none-any.whl@sha256:{ONE.sha256}",
        ),
    ],
)
def test_each_kind_of_layer_has_its_line_of_history(layer: PlannedLayer, line: str) -> None:
    assert oci.history_line(layer) == line


@pytest.mark.parametrize("line", ["os", "files", "files: ember bytecode", "", "RUN wheels", "wheels"])
def test_a_line_of_another_layer_names_no_wheels(line: str) -> None:
    assert oci.parse_history(line) is None


@pytest.mark.parametrize("python", ["", "3.9", "3.13"])
def test_history_names_the_wheels_of_a_layer(python: str) -> None:
    odd = replace(ONE, file="A.b_c-1!2.0+cu128-1-cp313-abi3-manylinux_2_28_x86_64.whl")
    assert oci.parse_history(oci.history_line(planned("wheels", "x", odd, TWO, python=python))) == LayerWheels(
        format=layer_order.LAYER_FORMAT, python=python, wheels=((odd.file, odd.sha256), (TWO.file, TWO.sha256))
    )


WHEEL = f"a-1-py3-none-any.whl@sha256:{'0' * 64}"


@pytest.mark.parametrize(
    "line",
    [
        "wheels ",
        "wheels format=1 python=3.11: ",
        f"wheels format=1 python=3.11:{WHEEL}",
        f"wheels format=1 python=3.11: {WHEEL} ",
        f"wheels format=1 python=3.11: {WHEEL}  {WHEEL}",
        f"wheels format=1 python=3.11: {WHEEL}\n",
        f"wheels format=1 python=3.11: {WHEEL}, {WHEEL}",
        f"wheels format=1 python=: {WHEEL}",
        f"wheels format=1 python=../..: {WHEEL}/x",
        f"wheels format=x python=3.11: {WHEEL}",
        f"wheels format=\u0661 python=3.11: {WHEEL}",
        f"wheels python=3.11: {WHEEL}",
        f"wheels format=1 python=3.11: {WHEEL[:-1]}",
        f"wheels format=1 python=3.11: {WHEEL.upper()}",
        f"wheels format=1 python=3.11: ../{WHEEL}",
        f"wheels format=1 python=3.11: a-1.tar.gz@sha256:{'0' * 64}",
        f"wheels format=1 python=3.11: a-1-py3-none-any.whl@md5:{'0' * 32}",
    ],
)
def test_an_invalid_line_is_refused(line: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        oci.parse_history(line)
