"""The step of Dockerfiles that refuses two packages with different files for one path."""

from __future__ import annotations

from pathlib import Path

import pytest

from templates.steps import overlaps

INIT, WRITER = "sha256=47DEQ,0", "tests/test_writer.py"


def install(site: Path, package: str, *rows: str) -> None:
    info = site / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "RECORD").write_text("".join(f"{row}\n" for row in (*rows, f"{info.name}/RECORD,,")))


def test_packages_may_share_equal_files(tmp_path: Path) -> None:
    for name in ("mcap", "mcap_protobuf_support"):
        install(tmp_path, name, f"ns/__init__.py,{INIT}", f"{name}/__init__.py,{INIT}")
    overlaps.main(tmp_path)


def test_a_path_with_two_files_is_refused(tmp_path: Path) -> None:
    """Whichever of them uv has written last."""
    site = tmp_path / "lib/site-packages"
    install(site, "mcap", f"{WRITER},sha256=a,1", '"a, b.py",sha256=a,1', "../../bin/run,sha256=a,1")
    install(site, "other", f"./{WRITER},sha256=b,1", '"a, b.py",sha256=a,1', "../../bin/run,,")
    with pytest.raises(SystemExit) as ended:
        overlaps.main(site)
    first, second, *hint = str(ended.value.code).splitlines()
    both = "mcap-1.0 and other-1.0 have different files for"
    assert [first, second] == [f"{both} {site}/{WRITER}", f"{both} {tmp_path}/bin/run"]
    assert "without `--method dockerfile`" in " ".join(hint)
