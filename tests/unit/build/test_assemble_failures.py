"""Assembling: errors and interrupts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from builder.common.errors import BuilderError, BuildError, DamagedError, EngineError, FetchError
from builder.index.download import CONNECTIONS
from builder.matrix.project import Project
from tests.fakes import locks
from tests.unit.build.assembling import BOARD, EMBER, JUPYTER, NOTEBOOK, QUARTZ, AssemblyBench

Edit = Callable[[str, str], Project]


def two_systems(benches: Callable[[], AssemblyBench], edit: Edit) -> AssemblyBench:
    """QUARTZ and BOARD have operating systems of their own, with the same Python."""
    bench = benches()
    bench.project = locks.write_os_locks(edit("board: {needs: [python]", "board: {apt: [git], needs: [python]"))
    images = bench.images(QUARTZ, BOARD)
    assert images[0].os_inputs != images[1].os_inputs
    return bench


def test_a_wheel_that_fails_fails_only_the_images_that_need_it(bench: AssemblyBench) -> None:
    """Running again fetches only what is missing."""
    bench.world.broken[NOTEBOOK] = error = FetchError("gone")
    images = bench.images(EMBER, JUPYTER, QUARTZ)
    assembler = bench.begin(images)
    assert assembler.build(images[0])
    with pytest.raises(FetchError) as caught:
        assembler.build(images[1])
    assert caught.value is error
    assert assembler.build(images[2])
    assembler.close()
    assert bench.find(EMBER)
    assert bench.find(JUPYTER) == ""
    assert f"{images[1].references[0]}.untested" not in bench.store.images()

    bench.world.broken.clear()
    bench.world.did()
    bench.run(JUPYTER)
    fetched, spliced, systems, _ = bench.world.did()
    assert (spliced, systems) == (["jupyter"], [])
    assert set(fetched) <= {"board", NOTEBOOK}
    assert NOTEBOOK in fetched


SHARED = "shared/x.txt"
SITE = "opt/venv/lib/python/site-packages"
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "a damaged wheel": ({"damaged": {"board": b"no zip"}}, "board-2.0-py3-none-any.whl: "),
    "different files for one path": (
        {"more": {"emberkit": {SHARED: b"one"}, NOTEBOOK: {SHARED: b"two"}}},
        f"{JUPYTER}: ember and jupyter have different files for /{SITE}/{SHARED}",
    ),
    "a file of the system in a wheel": (
        {"taken": (f"{SITE}/board/__init__.py",)},
        f"{JUPYTER}: /{SITE}/board/__init__.py is in the os layer and in jupyter",
    ),
    "a folder of another owner": ({"folders": ("etc",)}, "templates/ has a file for /etc/"),
    "a container that fails": ({"compile_error": "SyntaxError"}, "compile.py ended with status 1 in the container "),
    "other files than bytecode": (
        {"bytecode_path": lambda source: f"etc/{source}"},
        "the container that compiles bytecode returned 'etc/opt/venv/",
    ),
}


@pytest.mark.parametrize(("world", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_an_error_of_its_image(bench: AssemblyBench, world: dict[str, Any], message: str) -> None:
    """Wheels and containers of bytecode run programs of other people."""
    vars(bench.world).update(world)
    [image] = bench.images(JUPYTER)
    with pytest.raises(BuilderError) as caught:
        bench.begin([image]).build(image)
    assert str(caught.value).startswith(message)
    assert bench.store.images() == {}
    assert not list((bench.store.root / "tmp").iterdir())


def test_a_system_that_fails_fails_only_the_images_on_it(benches: Callable[[], AssemblyBench], edit: Edit) -> None:
    """Of the systems with the same Python, the next one that is ready compiles bytecode."""
    bench = two_systems(benches, edit)
    images = bench.images(BOARD, QUARTZ)
    bench.world.broken_systems[images[0].os_inputs] = error = BuildError("apt failed")
    assembler = bench.begin(images)
    assert assembler.build(images[1])
    with pytest.raises(BuildError) as caught:
        assembler.build(images[0])
    assert caught.value is error
    assembler.close()
    bench.world.broken_systems.clear()
    bench.world.did()
    assert bench.run(QUARTZ, BOARD)
    fetched, spliced, systems, _ = bench.world.did()
    assert (fetched, spliced, len(systems)) == ([], [], 1)


def test_bytecode_does_not_wait_for_a_system_with_the_python_of_another(
    benches: Callable[[], AssemblyBench], edit: Edit
) -> None:
    bench = two_systems(benches, edit)
    bench.run(QUARTZ)
    compiled = threading.Event()

    def wait() -> None:
        assert compiled.wait(10), "bytecode waits for the operating system"

    bench.world.before_compile = lambda _: compiled.set()
    bench.world.before_system = wait
    assert bench.run(BOARD)


def test_bytecode_is_not_compiled_in_a_system_of_other_inputs(bench: AssemblyBench) -> None:
    """The old one may be what had to be repaired."""
    systems: list[str] = []
    bench.world.before_compile = systems.append
    bench.run(QUARTZ)
    bench.refresh()
    bench.run(QUARTZ, BOARD)
    assert len(systems) == 2
    assert systems[0] != systems[1]


def test_files_that_cannot_be_used_fail_only_their_image(bench: AssemblyBench) -> None:
    for path in ("python/files/etc/x/y", "jupyter/files/etc/x"):
        file = bench.project.root / "templates" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    images = bench.images(EMBER, JUPYTER)
    assembler = bench.begin(images)
    assert assembler.build(images[0])
    with pytest.raises(BuildError):
        assembler.build(images[1])


def test_a_damaged_layer_below_bytecode_is_removed(bench: AssemblyBench) -> None:
    """Its size is right, so the store has it; the next run makes it again."""
    expected = bench.run(EMBER)
    [bytecode] = [layer for layer in bench.images(EMBER)[0].layers if layer.compiled]
    record = bench.store.get_record(bytecode.inputs)
    assert record
    bench.store.path(record["digest"]).unlink()
    damaged = bench.store.path(bench.layer("ember", EMBER).digest)
    damaged.write_bytes(bytes(damaged.stat().st_size))
    images = bench.images(EMBER)
    with pytest.raises(DamagedError):
        bench.begin(images).build(images[0])
    assert not damaged.exists()
    assert bench.run(EMBER) == expected


def test_nothing_waits_for_downloads_after_an_interrupt(bench: AssemblyBench, caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C: wheels arrive when there is no thread left to splice them."""
    is_fetching, may_finish = threading.Barrier(5), threading.Event()
    errors: list[BaseException] = []

    def before(_: str) -> None:
        is_fetching.wait(10)
        assert may_finish.wait(10)

    def assemble() -> None:
        try:
            assembler.assemble(image)
        except BaseException as error:  # noqa: BLE001  checked below
            errors.append(error)

    [image] = bench.images(QUARTZ)
    assert len(image.wheels) == CONNECTIONS == 4, "all of them are fetched at once"
    bench.world.before_fetch = before
    assembler = bench.begin([image])
    waiting = threading.Thread(target=assemble, daemon=True)
    waiting.start()
    is_fetching.wait(10)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assembler.close()
    may_finish.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(errors) == 1
    assert bench.world.spliced == []
    assert caplog.records == []


def test_downloads_are_stopped_after_a_failure(bench: AssemblyBench) -> None:
    """They are not waited for: gigabytes may be left."""
    is_stopped = threading.Event()

    def before(name: str) -> None:
        assert is_stopped.wait(10)
        raise FetchError(f"{name}: the download was stopped")

    bench.world.before_fetch, bench.world.on_stop = before, is_stopped.set
    bench.begin(bench.images(EMBER)).close()
    assert is_stopped.is_set()
    assert bench.world.fetched == []


def test_an_error_while_closing_does_not_hide_the_first_one(
    bench: AssemblyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine may be the reason for both."""
    [image] = bench.images(EMBER)
    assembler = bench.begin([image])
    assembler.build(image)
    removed: list[str] = []

    def remove(image_id: str) -> bool:
        removed.append(image_id)
        raise EngineError("Docker Engine went away")

    def fail() -> None:
        try:
            raise BuildError("first")
        finally:
            assembler.close()

    monkeypatch.setattr(bench.engine, "remove_image", remove)
    with pytest.raises(BuildError):
        fail()
    assert len(removed) == 1
