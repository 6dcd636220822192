"""matrix.yaml as a whole: invalid input gives one MatrixError with its place and what to do."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common import strict_yaml
from builder.common.errors import MatrixError
from builder.matrix import cells, reader
from builder.matrix.schema import Matrix
from tests.fakes.engine import place
from tests.paths import UNIT

TINY = (UNIT / "tiny/matrix.yaml").read_text(encoding="utf-8")


def load(text: str) -> Matrix:
    return reader.read_matrix(strict_yaml.parse_yaml(text.encode(), "matrix.yaml"))


def refusal(old: str, new: str) -> MatrixError:
    """The error that the tiny matrix gives with `old` replaced; it must name the line of the change."""
    assert TINY.count(old) == 1
    line = TINY[: TINY.index(old)].count("\n") + 1
    with pytest.raises(MatrixError) as caught:
        cells.expand(load(TINY.replace(old, new)))
    assert place(caught.value).startswith(f"matrix.yaml:{line}:"), str(caught.value)
    return caught.value


def before(old: str, text: str) -> tuple[str, str]:
    """An edit that puts `text` before `old`."""
    return old, text + old


# Dangerous values: (text in the tiny matrix, its replacement, part of the message).
HOSTILE = {
    "parent folder as component": ("board: {needs", '"../x": {needs', "'../x'"),
    "absolute path as component": ("board: {needs", '"/etc/x": {needs', "'/etc/x'"),
    "parent folder as variant": ("  board: [board]", '  "../x": [board]', "'../x'"),
    "parent folder as Debian release": ("  oldbird:\n", '  "../x":\n', "'../x'"),
    "parent folder as version": ("release: 0.5.3", "release: ../../etc", "'../../etc'"),
    "absolute path as namespace": ("namespace: team", "namespace: /etc", "'/etc' is not an image name"),
    "RUN line in a namespace": ("namespace: team", 'namespace: "team\\nRUN id"', "is not an image name"),
    "RUN line in a release": ("release: 0.5.3", 'release: "0.5.3\\nRUN id"', "expected a full version"),
    "RUN line in a package": ("packages: [board]", 'packages: ["board\\nRUN id"]', "Python requirement"),
    "RUN line in a Debian package": ("apt: [python3]", 'apt: ["python3\\nRUN id"]', "name of a Debian package"),
    "RUN line in a value of env": ("EMBER_HOME: /workspace", 'EMBER_HOME: "/w\\nRUN id"', "one line of printable"),
    "tab in a value of env": ("EMBER_HOME: /workspace", 'EMBER_HOME: "a\\tb"', "one line of printable"),
    "line separator in a value of env": ("EMBER_HOME: /workspace", 'EMBER_HOME: "a\\u2028b"', "one line of printable"),
    "long value of env": ("EMBER_HOME: /workspace", f"EMBER_HOME: {'a' * 4097}", "4096"),
    "RUN line in a command": ("command: [start-jupyter]", 'command: ["x\\nRUN id"]', "one word"),
    "RUN line in a block": ("namespace: team", "namespace: |\n  team\n  RUN id", "is not an image name"),
    "Jinja in a release": ("release: 0.5.3", 'release: "{{ 7*7 }}"', "expected a full version"),
    "Jinja in a pattern": ("boards: [", 'boards: ["{% raw %}", ', "a pattern of cell ids"),
    "Jinja in an image": ("image: quartz-cuda", 'image: "{{ x }}"', "an image name"),
    "shell in a Debian package": ("apt: [python3]", 'apt: ["python3;id"]', "name of a Debian package"),
    "option as a Debian package": ("apt: [python3]", "apt: [--purge]", "name of a Debian package"),
    "shell in a command": ("command: [start-jupyter]", 'command: ["$(id)"]', "one word"),
    "name of a variable": ("EMBER_HOME: /w", '"A B": /w', "a variable such as"),
    "option as a package": ("packages: [board]", "packages: [--extra-index-url=x]", "Python requirement"),
    "address of a package": ("packages: [board]", 'packages: ["board @ https://e.test/b.whl"]', "without an address"),
    "parent folder as an index": (*before("variants:\n", "indexes: {a: ../x}\n"), "a folder of the checkout such as"),
    "index through a parent folder": (*before("variants:\n", "indexes: {a: x/../../y/}\n"), "a folder of the checkout"),
    "absolute path as an index": (*before("variants:\n", "indexes: {a: /etc}\n"), "a folder of the checkout such as"),
    "RUN line in a folder": (*before("variants:\n", 'indexes: {a: "x\nRUN id"}\n'), "a folder of the checkout such as"),
    "newline after a release": ("release: 0.5.3", 'release: "0.5.3\\n"', "expected a full version"),
    "license that SPDX does not have": ("short: qz", "license: Apache 2\n    short: qz", "an SPDX license expression"),
    "newline after a short name": ("short: qz", 'short: "qz\\n"', "lower-case letters"),
    "newline after a registry": ("registry: registry.example.test:5000", 'registry: "e.test\\n"', "not a registry"),
    "newline after a digest": ('"2.31"', '"2.31\\n"', "a version of two numbers"),
    "other digits in a release": ("release: 0.5.3", 'release: "0.5.٣"', "expected a full version"),
    "other digits in glibc": ('"2.31"', '"\\uff12.31"', "a version of two numbers"),
    "other letters in a name": ("short: qz", 'short: "qž"', "lower-case letters"),
    "newline in a reason": ('"made up: asked for by one team"', '"made up:\\nasked for"', "a reason of one line"),
    "short reason": ('"made up: asked for by one team"', '"no"', "a reason of one line"),
    "tag of 129 characters": ("example/base:old@", f"example/base:{'a' * 129}@", "is not a tag"),
    "variant of 129 characters": ("  board: [board]", f"  {'b' * 129}: [board]", "a short name"),
    "leading zero in a release": ("release: 0.5.3", 'release: "0.05.3"', "expected a full version"),
    "leading zeros in a line": ('"0.5": {', '"00.5": {', "expected a version"),
    "release of 129 digits": ("release: 0.5.3", f"release: 0.5.{'3' * 129}", "expected a full version"),
    "image without digest": (f"example/base:old@sha256:{'1' * 64}", "example/base:old", "pinned by digest"),
    "port out of range": ("port: 8888", "port: 65536", "less than or equal to 65535"),
    "port 0 of a registry": ("registry.example.test:5000", "registry.example.test:0", "is not a registry"),
    "port of a registry out of range": ("registry.example.test:5000", "e.test:99999", "is not a registry"),
    "empty label in a registry": ("registry.example.test:5000", "a..b", "is not a registry"),
    "empty label in a staging place": (*before("namespace: team", "staging: a..b/x\n"), "is not a registry"),
    "library in every program": ("EMBER_HOME: /workspace", "LD_PRELOAD: /workspace/x.so", "a variable such as"),
    "parent folder in a health check": (
        "healthcheck: [check-jupyter]",
        "healthcheck: [/usr/local/bin/../../../workspace/check]",
        "one word of plain characters, without .. as a folder",
    ),
    "huge port": ("port: 8888", "port: 1" + "0" * 400, "port"),
    "truth value as port": ("port: 8888", "port: yes", "the truth value true"),
    "insecure registry with a path": (*before("namespace: team", "insecure: [e.test/x]\n"), "not a registry"),
    "insecure registry with a scheme": (*before("namespace: team", 'insecure: ["http://e.test"]\n'), "not a registry"),
    "insecure registry without a name": (*before("namespace: team", 'insecure: [""]\n'), "expected a registry such"),
    "all registries as insecure": (*before("namespace: team", 'insecure: ["*"]\n'), "not a registry"),
    "registry with a path": ("registry: registry.example.test:5000", "registry: e.test/x", "not a registry"),
    "shell in a package of a Python": (*before("debian: oldbird}", 'apt: ["python3;id"], '), "Debian package"),
    "RUN line in uv's release": ("{debian: oldbird}", '{debian: oldbird, uv: "3.9.1\\nRUN id"}', "a full version"),
    "address as a toolkit": ("toolkit: 12.10.1", "toolkit: https://e.test/x", "a full version"),
    "other CUDA than a version or cpu": ('  "12.9": {}', "  gpu: {}", 'a version such as "12.8", or cpu'),
    "address of a constraint": (
        *before("release: 0.5.3", 'constraints: ["x @ https://e.test/x.whl"], '),
        "without an address",
    ),
    "option as a constraint": ("{release: 0.5.3", "{constraints: [--pre], release: 0.5.3", "Python requirement"),
    "line in a constraint": ("{release: 0.5.3", '{constraints: ["x<1\\n--pre"], release: 0.5.3', "Python requirement"),
    "constraint with an extra": ("{release: 0.5.3", '{constraints: ["x[y]<2"], release: 0.5.3', "without extras"),
    "parent folder as a line's component": ("{release: 0.5.3", '{components: ["../x"], release: 0.5.3', "'../x'"),
    "package for a full CUDA version": (
        *before("package: quartz[cuda]", 'package_on: {"12.9": x}\n    '),
        "the first number of a CUDA",
    ),
    "version in a package for a CUDA": (
        *before("package: quartz[cuda]", 'package_on: {"12": x==1}\n    '),
        "without a version",
    ),
    "path as an image for the cpu": ("image: quartz-cuda", "cpu_image: ../x\n    image: quartz-cuda", "an image name"),
    "budget in another unit": (
        *before("exclude:", 'budgets: [{cells: "*", image: 4GiB, layer: 1GB}]\n'),
        "a size such as 4.3GB",
    ),
    "budget that is no number": (
        *before("exclude:", 'budgets: [{cells: "*", image: 4GB, layer: -1GB}]\n'),
        "a size such as 4.3GB",
    ),
    "https address of an archive": (*before('    glibc: "2.36"', "    archive: https://e.test\n"), "an http address"),
    "slash at the end of an archive": (
        *before('    glibc: "2.36"', "    archive: http://e.test/\n"),
        "without a slash",
    ),
    "option in a snapshot archive": (
        *before('    glibc: "2.36"', '    snapshot: "http://e.test [trusted=yes]"\n'),
        "an http address such as http://snapshot.example.com/archive, without a slash at the end, or none",
    ),
    "namespace over 255 characters": ("namespace: team", f"namespace: {'a' * 256}", "is not an image name"),
}


@pytest.mark.parametrize(("old", "new", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_values(old: str, new: str, message: str) -> None:
    error = refusal(old, new)
    assert message in str(error)
    assert "\n" not in str(error), "one fault, one line"


@pytest.mark.parametrize("release", ["0.6.0rc1", "0.6.0a2", "0.5.3.post1", "0.6.0b1.post2.dev3", "0.6.0.dev20261101"])
def test_pre_releases_and_post_releases(release: str) -> None:
    matrix = load(TINY.replace("release: 0.5.3", f"release: {release}"))
    assert matrix.frameworks["quartz"].versions["0.5"].release == release


@pytest.mark.parametrize("release", ["0.6.0-rc1", "0.6.0.rc1", "0.6.0RC1", "0.6.0c1", "0.6.0rc01", "0.5.3-1"])
def test_releases_that_indexes_write_otherwise(release: str) -> None:
    assert "expected a full version" in str(refusal("release: 0.5.3", f"release: {release}"))


UNQUOTED = {
    "in a list": ('cuda: ["12.10", "12.9"]', "cuda: [12.10, 12.9]", "12.10 is read as the number 12.1", '"12.10"'),
    "as a value": ('glibc: "2.31"', "glibc: 2.30", "2.30 is read as the number 2.3", '"2.30"'),
    "as a whole number": ("namespace: team", "namespace: 17", "17 is read as the number 17", '"17"'),
    "as a truth value": ("short: qz", "short: no", "no is read as the truth value false", '"no"'),
}


@pytest.mark.parametrize(("old", "new", "message", "quoted"), UNQUOTED.values(), ids=UNQUOTED.keys())
def test_unquoted_values(old: str, new: str, message: str, quoted: str) -> None:
    error = refusal(old, new)
    assert message in str(error)
    assert f"quote it: {quoted}" in str(error)


def test_a_value_that_is_invalid_in_quotes_too() -> None:
    """The advice must not be `quote it: "4.7"`, which is refused too."""
    text = "namespace: team\nbudgets: [{cells: '*', image: 4.7, layer: 1GB}]"
    with pytest.raises(MatrixError) as caught:
        load(TINY.replace("namespace: team", text))
    assert "budgets.0.image: 4.7 is read as the number 4.7; expected a size such as 4.3GB or 900MB" in str(caught.value)
    error = refusal("release: 0.5.3", "release: 2026-01-02")
    assert '2026-01-02 is read as a date; expected a full version such as "2.9.1"' in str(error)


def test_two_components_of_a_variant_with_one_port() -> None:
    with pytest.raises(MatrixError) as caught:
        load(TINY.replace("board: {needs: [", "board: {port: 8888, needs: ["))
    assert place(caught.value).startswith("matrix.yaml:")
    assert "variants.jupyter.1: board and jupyter both use port 8888" in str(caught.value)


def test_a_value_is_printed_once() -> None:
    message = "namespace: 'ORG' is not an image name: use lower-case letters, digits, and . _ - / between them"
    assert str(refusal("namespace: team", "namespace: ORG")).endswith(message)


def test_unquoted_key() -> None:
    error = refusal('"3.11": {debian: newbird}', "3.10: {debian: newbird}")
    assert "key 3.10 is read as a number" in str(error)
    assert error.hint == 'Quote it: "3.10"'


UNKNOWN = {
    "at the top": ("include:", "includes:", "includes: unknown key; did you mean 'include'?"),
    "of a framework": ("package: ember\n", "pakage: ember\n", "did you mean 'package'?"),
    "of a version": ("{release: 0.5.3", "{relase: 0.5.3", "did you mean 'release'?"),
    "of a component": ("healthcheck: [", "helthcheck: [", "did you mean 'healthcheck'?"),
    "of an exclusion": ("exclude:\n  - {cells:", "exclude:\n  - {reson: x, cells:", "did you mean 'reason'?"),
    "of CUDA": ("{toolkit: 12.10.1}", "{toolkit: 12.10.1, driver: x}", "driver: unknown key; known: toolkit, env"),
    "of a Python": ("{debian: oldbird}", "{debian: oldbird, atp: [git]}", "did you mean 'apt'?"),
    "of the image on the cpu": ("image: quartz-cuda\n", "cpu_imge: quartz-cuda\n", "did you mean 'cpu_image'?"),
}


@pytest.mark.parametrize(("old", "new", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unknown_keys(old: str, new: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        load(TINY.replace(old, new))
    # A misspelt key is also a missing one; both are listed, each with its place.
    [fault] = [line for line in str(caught.value).splitlines() if message in line]
    same = next(n for n, (before, after) in enumerate(zip(old, new, strict=False)) if before != after)
    line = TINY[: TINY.index(old) + same].count("\n") + 1
    assert fault.startswith(f"matrix.yaml:{line}:")


REFERENCES = {
    "Debian release": (
        "{debian: oldbird}",
        "{debian: oldbirt}",
        "no Debian release 'oldbirt'; did you mean 'oldbird'?",
    ),
    "component of a variant": (
        "[board, jupyter]",
        "[board, jupiter]",
        "no component 'jupiter'; did you mean 'jupyter'",
    ),
    "needed component": ("cuda: {needs: [python]}", "cuda: {needs: [pyton]}", "no component 'pyton'"),
    "CUDA of a version": (
        'cuda: ["12.10", "12.9"]',
        'cuda: ["12.11", "12.9"]',
        "no CUDA version '12.11' (add it under cuda:)",
    ),
    "component twice in a variant": ("[board, jupyter]", "[board, jupyter, board]", "duplicate 'board'"),
    "component twice in a line": (
        *before("release: 0.5.3", "components: [board, board], "),
        "duplicate 'board'",
    ),
    "need twice": ("cuda: {needs: [python]}", "cuda: {needs: [python, python]}", "duplicate 'python'"),
    "set of no cell": ('boards: ["*-board"]', "boards: []", "at least 1 item"),
    "version twice": ('["3.11", "3.9"]', '["3.11", "3.11"]', "duplicate '3.11'"),
    "brace not closed": ("boards: [", 'boards: ["qz-{a,b", ', "expected a pattern whose brackets are all closed"),
    "brace not opened": ("boards: [", 'boards: ["qz-a}", ', "expected a pattern whose brackets are all closed"),
    "bracket not closed": ("boards: [", 'boards: ["qz-[ab", ', "expected a pattern whose brackets are all closed"),
    "short name twice": ("short: qz", "short: em", "short: 'em' is already used by ember"),
    "image twice": ("image: quartz-cuda", "image: ember-cuda", "image: 'ember-cuda' is already used by ember"),
    "circle": ("base: {apt: [", "base: {needs: [cuda], apt: [", "circular needs: base -> cuda -> python -> base"),
    "need of itself": ("base: {apt: [", "base: {needs: [base], apt: [", "circular needs: base -> base"),
    "component of a line": (
        *before("release: 0.5.3", "components: [bord], "),
        "no component 'bord'; did you mean 'board'?",
    ),
    "architecture": (
        *before("release: 0.5.3", "arch: [amd64, arm], "),
        "input should be 'amd64' or 'arm64', found 'arm'",
    ),
    "architecture twice": (*before("release: 0.5.3", "arch: [arm64, arm64], "), "duplicate 'arm64'"),
    "no architecture": (*before("release: 0.5.3", "arch: [], "), "at least 1 item"),
    "architecture by an unknown CUDA": (
        *before("release: 0.5.3", 'arch: {"12.8": [arm64]}, '),
        "no CUDA version '12.8'",
    ),
    "variant with the name of an architecture": ("  board: [board]", "  arm64: [board]", "give the variant another"),
    "a release of another Python": (
        "{debian: oldbird}",
        "{debian: oldbird, uv: 3.12.1}",
        "3.12.1 is not a release of Python 3.9",
    ),
    # Its image had none, which the build found out minutes later.
    "a Python without packages": (
        "{debian: oldbird}",
        "{debian: oldbird, apt: []}",
        "python.3.9.apt: no packages: delete `apt`, or add `uv` with a full release",
    ),
    "a toolkit of another CUDA": ("12.10.1}", "12.6.3}", "cuda-toolkit 12.6.3 is not a release of CUDA 12.10"),
    "a toolkit for the cpu": (
        *before('"12.9": {}', "cpu: {toolkit: 12.9.1}\n  "),
        "12.9.1 is not a release of CUDA cpu",
    ),
    "a package for no CUDA": (
        *before("package: ember\n", 'package_on: {"14": ember}\n    '),
        "no CUDA major version '14'",
    ),
    "a budget of nothing": (
        *before("exclude:", 'budgets: [{cells: "zz-*", image: 1GB, layer: 1GB}]\n'),
        "'zz-*' matches no cell",
    ),
    "package with a version": ("package: quartz[cuda]", 'package: "quartz>=0.5"', "package"),
    "package with a marker": ("package: quartz[cuda]", "package: quartz; python_version>'3'", "package"),
}


@pytest.mark.parametrize(("old", "new", "message"), REFERENCES.values(), ids=REFERENCES.keys())
def test_contradictions_between_parts(old: str, new: str, message: str) -> None:
    assert message in str(refusal(old, new))


CPU = TINY.replace('  "12.9": {}\n', '  "12.9": {}\n  cpu: {}\n').replace(
    "{release: 0.5.3, cuda: [", "{release: 0.5.3, cuda: [cpu, "
)
NAMED = CPU.replace("image: quartz-cuda\n", "image: quartz-cuda\n    cpu_image: quartz\n")


def test_package_and_image_of_a_cuda() -> None:
    matrix = load(NAMED.replace("quartz[cuda]", 'quartz\n    package_on: {"12": "quartz[cuda12]", cpu: quartz-cpu}'))
    quartz = matrix.frameworks["quartz"]
    assert [quartz.package_for(cuda) for cuda in ("12.9", "12.10", "13.0", "1.2", "cpu")] == [
        "quartz[cuda12]", "quartz[cuda12]", "quartz", "quartz", "quartz-cpu",
    ]  # fmt: skip
    assert [quartz.image_for(cuda) for cuda in ("12.9", "cpu")] == ["quartz-cuda", "quartz"]
    ember = matrix.frameworks["ember"]
    assert [ember.image_for(cuda) for cuda in ("12.9", "cpu")] == ["ember-cuda", "ember-cuda"]


def test_a_line_on_the_cpu_without_an_image_name() -> None:
    """The tag `quartz-cuda:0.5-cpu` would contradict itself."""
    with pytest.raises(MatrixError) as caught:
        load(CPU)
    line = CPU[: CPU.index("cuda: [cpu,")].count("\n") + 1
    assert place(caught.value).startswith(f"matrix.yaml:{line}:")
    assert "frameworks.quartz.versions.0.5.cuda: no image name for the cpu: add `cpu_image:`" in str(caught.value)


@pytest.mark.parametrize("image", ["ember-cuda", "quartz-cuda"], ids=["another framework's", "its own"])
def test_an_image_for_the_cpu_with_a_name_in_use(image: str) -> None:
    with pytest.raises(MatrixError, match=rf"cpu_image: '{image}' is already used by {image.removesuffix('-cuda')}"):
        load(NAMED.replace("cpu_image: quartz\n", f"cpu_image: {image}\n"))


@pytest.mark.parametrize(
    ("entry", "packages"),
    [
        ("{debian: oldbird}", ["python3", "python3-venv"]),
        ("{debian: oldbird, apt: [python3, python3-extra]}", ["python3", "python3-extra"]),
        ("{debian: oldbird, uv: 3.9.25}", []),
        ("{debian: oldbird, uv: 3.9.25, apt: [libextra]}", ["libextra"]),
    ],
)
def test_debian_packages_of_a_python(entry: str, packages: list[str]) -> None:
    """A Python of uv needs none."""
    assert load(TINY.replace("{debian: oldbird}", entry)).python["3.9"].packages == packages


def test_no_plain_variant() -> None:
    with pytest.raises(MatrixError, match=r"^matrix.yaml:\d+:\d+: variants: 'plain' is missing"):
        load(TINY.replace("  plain: []\n", ""))


@pytest.mark.parametrize(
    ("text", "value"), [("", "nothing"), ("[]", "a list"), ("x", "'x'"), ("3.1", "the number 3.1")]
)
def test_no_mapping(text: str, value: str) -> None:
    with pytest.raises(MatrixError, match=rf"^matrix.yaml:1:1: expected `key: value` lines, found {value}"):
        load(text)


@pytest.mark.parametrize(
    "text", [f"registry: {'x ' * 9000}", "\n".join(f"key{n}: 1" for n in range(1500))], ids=["value", "keys"]
)
def test_many_faults_give_a_short_error(text: str) -> None:
    with pytest.raises(MatrixError) as caught:
        load(text)
    assert len(str(caught.value)) < 10_000


def test_missing_parts() -> None:
    with pytest.raises(MatrixError) as caught:
        load("registry: e.test\n")
    faults = str(caught.value).splitlines()
    assert [fault.split(": ")[1] for fault in faults] == [
        "namespace", "debian", "python", "cuda", "frameworks", "components", "variants",
    ]  # fmt: skip
    assert all(fault.endswith(": missing") for fault in faults)


@given(st.text(max_size=20))
def test_any_text_as_a_value(value: str) -> None:
    """A release is a version of digits and dots, or the error is a MatrixError."""
    quoted = '"' + "".join(f"\\U{ord(char):08x}" for char in value) + '"'
    try:
        matrix = load(TINY.replace("release: 0.5.3", f"release: {quoted}"))
    except MatrixError as error:
        where = place(error)
    else:
        where = "matrix.yaml:"
        assert set(matrix.frameworks["quartz"].versions["0.5"].release) <= set("0123456789.")
    assert where.startswith("matrix.yaml:")


SCAN = 'scan: {command: [scanner, "sbom:{sbom}"], parallel: 2}'


def test_a_matrix_has_a_scanner_or_none() -> None:
    settings = load(f"{SCAN}\n{TINY}").scan
    assert settings
    assert (settings.command, settings.parallel) == (["scanner", "sbom:{sbom}"], 2)
    assert load(f"scan: null\n{TINY}").scan is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sbom:{sbom}", "sbom", "expected {sbom} in an argument of `command`"),
        ('[scanner, "sbom:{sbom}"]', '["{sbom}"]', "expected {sbom} in an argument of `command`"),
        ('"sbom:{sbom}"', '"sbom:{sbom}", "--name={image}"', "unknown placeholder {image}: use only {sbom}"),
        ("scanner,", '"a\\nb",', "one line of 1 to 300 characters"),
        ("parallel: 2", "parallel: 0", "greater than or equal to 1"),
        ("parallel: 2", "refuse: high", "scan.refuse: unknown key; known: command, parallel"),
        ("parallel: 2", "exceptions: []", "scan.exceptions: unknown key; known: command, parallel"),
    ],
)
def test_a_scanner_that_is_invalid_is_refused(old: str, new: str, message: str) -> None:
    assert SCAN.count(old) == 1
    with pytest.raises(MatrixError) as caught:
        load(f"{SCAN.replace(old, new)}\n{TINY}")
    assert place(caught.value).startswith("matrix.yaml:1:")
    assert message in str(caught.value)


COMMAND = 'test: {gpu_command: [srun, "--image={image}", "a b", "{command}"]}'


def test_a_matrix_has_a_command_for_gpu_tests_or_none() -> None:
    settings = load(f"{COMMAND}\n{TINY}").test
    assert settings
    assert settings.gpu_command == ["srun", "--image={image}", "a b", "{command}"]
    assert load(f"test: null\n{TINY}").test is None
    load(f"{COMMAND.replace('a b', '${image%%/*} ${name} {} {.status}')}\n{TINY}")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{command}", "{comand}", "gpu_command.3: '{comand}': unknown placeholder {comand}: use {image} and {command}"),
        ("--image={image}", "--image", "gpu_command: expected {image} in a word"),
        ("{command}", "${command}", "gpu_command: expected {command} in a word"),
        ("a b", "a\\nb", "one line of printable characters, at most 4096"),
        ('[srun, "--image={image}", "a b", "{command}"]', "[]", "at least 1 item"),
        ("gpu_command", "command", "test.command: unknown key; did you mean 'gpu_command'?"),
    ],
)  # fmt: skip
def test_a_command_for_gpu_tests_that_is_invalid_is_refused(old: str, new: str, message: str) -> None:
    assert COMMAND.count(old) == 1
    with pytest.raises(MatrixError) as caught:
        load(f"{COMMAND.replace(old, new)}\n{TINY}")
    assert place(caught.value).startswith("matrix.yaml:1:")
    assert message in str(caught.value)


# ---- indexes

INDEXES = "indexes: {company: https://python.example.test/simple, cpu-only: http://127.0.0.1/x}\n"


def with_indexes(*edits: tuple[str, str]) -> str:
    text = TINY.replace("debian:\n", INDEXES + "debian:\n", 1)
    for old, new in edits:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


EMBER_INDEX = "        packages: [ember-extra==1.10.0]\n"
NOTEBOOK = "    packages: [notebook]\n"


def test_the_index_of_each_package() -> None:
    matrix = load(
        with_indexes(
            (EMBER_INDEX, EMBER_INDEX + '        index: company\n        index_on: {"12.9": cpu-only}\n'),
            (NOTEBOOK, NOTEBOOK + "    index: company\n"),
        )
    )
    by_id = {cell.id: cells.indexes_of_packages(matrix, cell) for cell in cells.expand(matrix)}
    own = {"ember": "company", "ember-extra": "company", "notebook": "company"}
    assert by_id["em-1.10-cu1210-py311"] == own
    assert by_id["em-1.10-cu129-py311-jupyter"] == own | {"ember": "cpu-only", "ember-extra": "cpu-only"}
    # A package of a private index comes from there in every image, also if another package requires it.
    assert by_id["qz-0.5-cu129-py311"] == {"notebook": "company"}
    assert matrix.indexes["company"] == "https://python.example.test/simple"


def test_all_packages_of_a_framework_have_the_index_of_its_line() -> None:
    """explain also looks up `package`, whatever `package_on` names for the CUDA: it asked the default index."""
    matrix = load(
        with_indexes(
            ("package: ember\n", 'package: ember\n    package_on: {"12": ember-gpu}\n'),
            (EMBER_INDEX, EMBER_INDEX + "        index: company\n"),
        )
    )
    [cell] = [cell for cell in cells.expand(matrix) if cell.id == "em-1.10-cu129-py311"]
    assert cells.indexes_of_packages(matrix, cell) == dict.fromkeys(("ember", "ember-gpu", "ember-extra"), "company")


@pytest.mark.parametrize(
    "url",
    [
        "https://git.example.test/api/v4/projects/group%2Fproject/packages/pypi/simple",
        "https://feeds.example.test/team/_packaging/feed@view/pypi/simple/",
        "http://[::1]:3141/root/pypi/+simple",
        "https://[2001:db8::7]/simple",
    ],
)
def test_an_address_of_an_index(url: str) -> None:
    """The first is GitLab's for the path of a project, the second Azure's for a view of a feed."""
    matrix = load(with_indexes(("https://python.example.test/simple", f'"{url}"')))
    assert matrix.indexes["company"] == url


BAD_INDEXES = {
    "an unknown index of a component": (NOTEBOOK, NOTEBOOK + "    index: compny\n", "did you mean 'company'?"),
    "an unknown index of a line": (EMBER_INDEX, EMBER_INDEX + "        index: none\n", "no index 'none'"),
    "an unknown index for a CUDA": (EMBER_INDEX, EMBER_INDEX + '        index_on: {"12.9": x}\n', "no index 'x'"),
    "an unknown CUDA": (EMBER_INDEX, EMBER_INDEX + '        index_on: {"12.8": company}\n', "no CUDA version '12.8'"),
    "an index without packages": ("cuda: {needs: [python]}", "cuda: {needs: [python], index: company}", "no effect"),
    "an address with a login": ("company: https://", "company: https://me:pw@", "without a login"),
    "an address with a query": ("simple,", "simple?token=x,", "without a login"),
    "an address with a login and an @ in its path": ("https://python", "https://me:pw@p/x@y", "login"),
    "an address with half of an escape": ("simple,", "a%2,", "without a login"),
    "an invalid IPv6 address": ("https://python.example.test/simple", '"https://[1::2::3]/"', "1::2::3"),
    "an invalid port": ("example.test/", "example.test:99999/", "Port out of range"),
    "an address of a file": ("company: https://", "company: file://", "an address such as"),
    "a local version as a release": ("release: 0.5.3", "release: 0.5.3+cpu", "without a local version"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BAD_INDEXES.values(), ids=BAD_INDEXES.keys())
def test_invalid_indexes(old: str, new: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        load(with_indexes((old, new)))
    assert message in str(caught.value)
    assert re.match(r"matrix\.yaml:\d+:\d+: ", str(caught.value))
    assert "pw" not in str(caught.value)


def test_a_package_with_two_indexes_is_refused() -> None:
    edits = ((EMBER_INDEX, EMBER_INDEX.replace("]", ", Notebook]") + "        index: cpu-only\n"),)
    with pytest.raises(MatrixError) as caught:
        load(with_indexes(*edits, (NOTEBOOK, NOTEBOOK + "    index: company\n")))
    for index in ("company", "cpu-only"):
        assert f"notebook has 2 indexes, here '{index}': name one for it" in str(caught.value)
    load(with_indexes(*edits, (NOTEBOOK, NOTEBOOK + "    index: cpu-only\n")))
