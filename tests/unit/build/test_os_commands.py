"""Commands of a Dockerfile's stage: read if they can be run without BuildKit, else left to it."""

from __future__ import annotations

import pytest

from builder.build.os_commands import Command, commands

STAGE = """\
ARG BASE=debian:example
FROM ${BASE} AS before
RUN true

# ---- os: a comment
FROM ${BASE} AS os
RUN --mount=type=bind,source=templates/host,target=/mnt/host \\
    --mount=type=bind,source=templates/steps,target=/mnt/steps \\
    # a comment between lines
    --mount=type=cache,id=apt,target=/var/cache/apt,sharing=locked \\
    KEY=1 sh /mnt/steps/os.sh python3 \\
    tini

RUN echo 'two  words' && \\
    echo "$HOME"

FROM os AS image
RUN false
"""


def test_commands_and_their_mounts() -> None:
    first, second = commands(STAGE, "os") or ()
    assert first.text.split() == ["KEY=1", "sh", "/mnt/steps/os.sh", "python3", "tini"]
    assert first.mounts == {"/mnt/host": "templates/host", "/mnt/steps": "templates/steps"}
    assert second == Command(text="""echo 'two  words' &&     echo "$HOME\"""", mounts={})


@pytest.mark.parametrize(
    "instruction",
    [
        "COPY --from=python /opt /opt", "ENV KEY=value", "WORKDIR /workspace", 'RUN ["echo", "exec form"]',
        "RUN <<END", "RUN --network=none true", "RUN --mount=type=secret,id=key true",
        "RUN --mount=type=bind,from=tools,source=/opt,target=/mnt true",
        "RUN --mount=type=bind,source=a,target=/mnt,readwrite true",
    ],
)  # fmt: skip
def test_a_stage_with_anything_else_is_left_to_buildkit(instruction: str) -> None:
    text = f"FROM ${{BASE}} AS os\nRUN true\n{instruction}\n"
    assert commands("FROM ${BASE} AS os\nRUN true\n", "os") == (Command(text="true", mounts={}),)
    assert commands(text, "os") is None


@pytest.mark.parametrize("text", ["", "FROM debian AS os\nRUN true\n", "FROM ${BASE} AS other\nRUN true\n"])
def test_a_stage_on_another_base_or_a_missing_one_is_left_to_buildkit(text: str) -> None:
    assert commands(text, "os") is None
