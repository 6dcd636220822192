"""Which known layers a render keeps. Files of images/: tests/unit/plan/test_render.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.common.errors import StaleError
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.matrix.project import Project
from builder.plan import plan
from builder.steps.render import render_images
from tests.fakes import locks


def test_a_check_fails_if_a_render_would_change_the_known_layers(tiny: Project) -> None:
    chosen = tiny.select(locks.LOCKED)
    render_images(tiny, chosen, is_part=False)
    known, path = KnownLayers(tiny.root), tiny.root / KNOWN_LAYERS
    planned = plan.make_locked_plan(tiny, chosen).images[0].layers[0]
    layer = Layer(digest=f"sha256:{'1' * 64}", diff_id=f"sha256:{'2' * 64}", size=1, unpacked=1)
    known.add(planned, layer)
    known.write()
    render_images(tiny, chosen, is_part=False, check=True)
    known.add(replace(planned, inputs=f"sha256:{'3' * 64}"), layer)
    known.write()
    before = path.read_bytes()
    with pytest.raises(StaleError):
        render_images(tiny, chosen, is_part=False, check=True)
    assert path.read_bytes() == before
    render_images(tiny, chosen, is_part=True, check=True)
    assert render_images(tiny, chosen, is_part=False)[1] == [f"{KNOWN_LAYERS} (without layers that no image has)"]
    render_images(tiny, chosen, is_part=False, check=True)
