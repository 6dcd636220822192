"""`builder add`: what is printed."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.layers.store import Store
from tests.unit.cli.conftest import Run
from tests.unit.release.parents import project
from tests.unit.steps.test_add import PARENT, TARGET, Bench, install


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(Store(tmp_path / "store"))
    bench.parent.push("1")
    bench.share()
    bench.offer(project("einops", version="0.8"))
    install(bench, monkeypatch)
    return bench


def test_the_lines_of_the_steps(run: Run, bench: Bench) -> None:
    store = ("--store", str(bench.store.root))
    result = run(*store, "add", str(PARENT), "einops", "-t", str(TARGET))
    assert result.code == 0
    words = [line.split()[0] for line in result.err.splitlines()]
    assert words == ["parent", "resolve", "resolve", "layers", "pushed", "nothing"]
    assert result.err.endswith("nothing was tested: --test imports each package, and runs `pip check`\n")
    assert result.out.startswith(f"{TARGET}@{bench.target.tags['1']}  in ")

    bench.target.contents |= bench.parent.registry.contents
    result = run(*store, "add", "--refresh", str(TARGET))
    assert "is up to date" in result.err
