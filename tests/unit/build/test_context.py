"""The records of a checkout's images, and what `builder clean` removes."""

from __future__ import annotations

from builder.build.context import clean, record_built
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from tests.fakes.engine import FakeEngine


def test_clean_removes_untagged_images_of_this_checkout_and_logs(tiny: Project) -> None:
    engine = FakeEngine()
    untagged = engine.add_image("sha256:old", labels={PLAN_LABEL: "sha256:0"})
    engine.add_image("sha256:others", labels={PLAN_LABEL: "sha256:1"})
    tagged = engine.add_image("org/ember:1", labels={PLAN_LABEL: "sha256:2"})
    record_built(tiny.state, untagged)
    record_built(tiny.state, tagged)
    tiny.logs.mkdir(parents=True)
    (tiny.logs / "x.log").write_text("")
    assert clean(engine, tiny, cache=False) == "removed 0 containers and 1 image"
    assert engine.calls == ["sweep", "sweep", f"remove {untagged}"]
    assert list(tiny.logs.iterdir()) == []
    assert clean(engine, tiny, cache=True).endswith(", freed 5.0 GB of build cache")
