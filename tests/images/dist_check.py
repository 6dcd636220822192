"""Tests of `dist-check` for the image of any framework. The framework's test file imports them.

It also defines the fixture `library`: the name of the framework's library for the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from docker.models.containers import Container

from tests.images.containers import run_in

Pair = list[tuple[Container, str]]


def run(container: Container, *options: str) -> tuple[int, str, str]:
    """Runs dist-check with a proxy that does not answer: its exit code, stdout and stderr."""
    proxy = "http_proxy=http://192.0.2.1:3128"  # RFC 5737: no machine has this address
    return run_in(container, ["env", proxy, f"https_{proxy[5:]}", "dist-check", *options])


def assert_success(report: dict[str, Any], library: str) -> None:
    """Every sum of at least three types was exact on both ranks, and the bandwidth was measured."""
    assert report["problems"] == []
    assert report["ok"]
    assert report["world"] == 2
    assert report["library"] == library
    assert [check for check in report["checks"] if check["wrong_ranks"]] == []
    assert {check["dtype"] for check in report["checks"]} >= {"float32", "float64", "int64"}
    assert [row["bytes"] for row in report["bandwidth"]] == [2**10, 2**16, 2**20]
    # With two ranks, each moves the data once.
    assert all(row["bus"] == row["algorithm"] > 0 for row in report["bandwidth"])


@pytest.fixture(scope="module")
def pair(keep: Callable[..., Container]) -> Pair:
    """Two containers on the default network, with their addresses."""
    containers = []
    for _ in range(2):
        container = keep(["sleep", "3600"])
        container.reload()
        (network,) = container.attrs["NetworkSettings"]["Networks"].values()  # Docker's is `bridge`, Podman's `podman`
        containers.append((container, str(network["IPAddress"])))
    return containers


@pytest.mark.thorough
def test_dist_check_of_two_processes(container: Container, library: str) -> None:
    code, out, err = run(container, "-n", "2", "--max-size", "1M", "--json")
    assert code == 0, out + err
    report = json.loads(out)
    assert_success(report, library)
    assert [rank["transports"] for rank in report["ranks"]] == [["TCP"], ["TCP"]]


@pytest.mark.thorough
def test_dist_check_of_two_containers(pair: Pair, library: str) -> None:
    """Each container uses its own interface and address to reach the other."""
    (first, address), (second, second_address) = pair
    options = ["--nodes", "2", "--master", f"{address}:29500", "--max-size", "1M"]
    with ThreadPoolExecutor(1) as background:
        second_result = background.submit(run, second, "--rank", "1", *options)
        code, out, err = run(first, "--rank", "0", "--json", *options)
        assert second_result.result()[0] == 0, second_result.result()
    assert code == 0, out + err
    report = json.loads(out)
    assert_success(report, library)
    assert [rank["host"] for rank in report["ranks"]] == [str(container.id)[:12] for container in (first, second)]
    assert [rank["interfaces"] for rank in report["ranks"]] == [["eth0"], ["eth0"]]
    assert [rank["addresses"] for rank in report["ranks"]] == [[address], [second_address]]
    assert second_address in report["ranks"][0]["peers"]


@pytest.mark.thorough
def test_dist_check_names_the_missing_rank(pair: Pair) -> None:
    (first, address), (second, _) = pair
    options = ["--nodes", "2", "--master", f"{address}:29500", "--timeout", "2"]
    code, out, _ = run(first, "--rank", "0", *options)
    assert code == 1
    assert f"node 1 (rank 1) did not connect to {address}:29500 within 2 s" in out
    assert f"--rank 1 --master {address}:29500" in out  # the command for the missing node
    code, out, err = run(second, "--rank", "1", *options)
    assert code == 1
    assert "Connection refused" in err
    assert "start dist-check with --rank 0" in err
