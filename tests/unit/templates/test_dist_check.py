"""The pure parts of dist-check; the image tests run it with wrong sums, absent ranks and real connections."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from templates.base.files.usr.local.lib.dist_check import advice, cli, judge, machine, nccl, plan, show, where
from templates.base.files.usr.local.lib.dist_check.advice import Problem
from templates.base.files.usr.local.lib.dist_check.meeting import Meeting, Order
from templates.base.files.usr.local.lib.dist_check.where import Place, SettingsError


def hello(index: int = 0, **other: Any) -> dict[str, Any]:
    """The report of a member with one rank and no GPU."""
    return {
        "index": index,
        "members": 2,
        "host": f"host{index}",
        "address": f"10.0.0.{index + 5}",
        "interface": "eth0",
        "interfaces": {"lo": "127.0.0.1", "eth0": f"10.0.0.{index + 5}"},
        "gpus": 0,
        "processes": 1,
        "first_device": 0,
        "ports": [29501, 29502, 29503, 29504],
        "framework": "pytorch",
        "versions": {"python": "3.11.2", "torch": "2.9.1", "nccl": "2.27.5"},
        "variables": {},
        "shm_bytes": 8 * 2**30,
        "memlock": None,
        "infiniband": {"cards": {}, "devices": {}, "verbs": []},
        **other,
    }


def result(rank: int, **other: Any) -> dict[str, Any]:
    """The result of a rank without errors."""
    return {
        "rank": rank,
        "state": "done",
        "stage": "done",
        "device": "cpu",
        "log": "",
        "nccl": vars(nccl.NcclLog()),
        "connections": [[f"10.0.0.{rank + 5}", f"10.0.0.{6 - rank}"]],
        "checks": [{"dtype": "float32", "elements": 1000, "wrong": 0}],
        "measured": [{"bytes": 2**20, "seconds": 0.001}],
        **other,
    }


def report_of(*results: Mapping[str, Any], hellos: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    both = hellos or [hello(0), hello(1)]
    return judge.report(both, plan.make(both, "auto"), "gloo", results, [], timeout=60)


def causes(problems: list[dict[str, Any]]) -> list[str]:
    return [problem["what"] for problem in problems]


# ---- this member and the others


def find(environment: dict[str, str], **options: Any) -> Place:
    unset = {"nodes": None, "rank": None, "master": None, "processes": None}
    return where.find(**(unset | options), environment=environment)


def test_the_default_is_this_machine_alone() -> None:
    assert find({}) == Place(0, 1, "127.0.0.1", 0, None, 0, "this machine alone")


def test_options_override_a_launcher() -> None:
    place = find({"RANK": "5", "WORLD_SIZE": "8"}, nodes=2, rank=1, master="a:1234", processes=4)
    assert (place.index, place.members, place.host, place.port, place.processes) == (1, 2, "a", 1234, 4)


def test_the_port_after_the_one_that_torchrun_uses() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "2000"}
    started = find(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert started == Place(3, 4, "a", 2001, 1, 1, "torchrun")
    assert find(variables).port == 2000


def test_slurm() -> None:
    job = {"SLURM_JOB_NODELIST": "gpu[03-04]", "SLURM_JOB_ID": "1234567"}
    task = {"SLURM_PROCID": "9", "SLURM_NTASKS": "16", "SLURM_LOCALID": "1"}
    assert find(job | task) == Place(9, 16, "gpu03", 24567, 1, 1, "Slurm")
    assert find({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).alone


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu01", "gpu01"), ("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("r1n[8,9]-ib", "r1n8-ib"), ("", "")],
)
def test_first_host_of_a_slurm_node_list(nodes: str, first: str) -> None:
    assert where.first_host(nodes) == first


def test_an_indexed_job_needs_only_the_address_of_the_first_pod() -> None:
    variables = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc"}
    assert find(variables) == Place(2, 4, "job-0.svc", 29500, None, 0, "Indexed Job")


@pytest.mark.parametrize(
    ("environment", "options", "message"),
    [
        ({}, {"nodes": 2}, "--rank and --master"),
        ({}, {"nodes": 2, "rank": 2, "master": "a"}, "ranks are 0 to 1"),
        ({}, {"nodes": 2, "rank": 1, "master": "a:0"}, "host:port"),
        ({}, {"nodes": 2, "rank": 1, "master": "tcp://a:1"}, "host:port"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {}, "0 to WORLD_SIZE-1"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {}, "expected a number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {"processes": 2}, "remove -n"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "WORLD_SIZE and MASTER_ADDR"),
    ],
)
def test_ambiguous_settings_are_refused(environment: dict[str, str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        find(environment, **options)


@pytest.mark.parametrize(
    ("text", "expected"), [("a", ("a", 29500)), ("10.0.0.5:1", ("10.0.0.5", 1)), ("[fe80::1]:80", ("fe80::1", 80))]
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert where.address(text) == expected
    assert where.address(where.joined(*expected)) == expected


@pytest.mark.parametrize(("text", "count"), [("64M", 2**26), ("1K", 1024), ("512", 512), ("2GiB", 2**31)])
def test_sizes_as_text(text: str, count: int) -> None:
    assert cli._bytes(text) == count


# ---- the plan


def test_ranks_are_numbered_by_machine_and_get_its_gpus() -> None:
    job = plan.make([hello(0, gpus=2, processes=2), hello(1, gpus=3, processes=3)], "auto")
    assert (job.library, job.problems) == ("gpu", ())
    assert [(rank.rank, rank.member, rank.device, rank.port) for rank in job.ranks] == [
        (0, 0, 0, 29501),
        (1, 0, 1, 29502),
        (2, 1, 0, 29501),
        (3, 1, 1, 29502),
        (4, 1, 2, 29503),
    ]
    assert [rank.rank for rank in job.of_member(1)] == [2, 3, 4]


def test_a_task_uses_the_only_gpu_visible_to_it() -> None:
    assert plan.make([hello(0, gpus=1, first_device=3)], "auto").ranks[0].device == 0


def test_the_cpu_without_gpus_or_by_option() -> None:
    job = plan.make([hello(0), hello(1)], "auto")
    assert (job.library, job.why, job.problems) == ("cpu", "no GPU is visible here", ())
    job = plan.make([hello(0, gpus=1, processes=4)], "gloo")
    assert (job.library, job.problems) == ("cpu", ())


@pytest.mark.parametrize(
    ("hellos", "library", "message"),
    [
        ([hello(0, gpus=8), hello(1)], "auto", "no GPU is visible on node 1 (host1)"),
        ([hello(0), hello(1)], "nccl", "no GPU is visible on node 0 (host0), node 1 (host1)"),
        ([hello(0, gpus=2, processes=4)], "auto", "node 0 (host0) has 2 GPUs for 4 ranks"),
        ([hello(0, gpus=2, first_device=2)], "auto", "node 0 (host0) has 2 GPUs for 3 ranks"),
        (
            [hello(0), hello(1, versions={"python": "3.13.1", "torch": "2.15.0", "nccl": "2.27.5"})],
            "auto",
            "node 0 (host0) has torch 2.9.1, node 1 (host1) has torch 2.15.0",
        ),
        ([hello(0), hello(1, framework="jax")], "auto", "node 0 (host0) has pytorch, node 1 (host1) has jax"),
        (
            [hello(0, address="127.0.1.1"), hello(1)],
            "auto",
            "has the address 127.0.1.1, which other nodes cannot reach",
        ),
        (
            [hello(0), hello(1, variables={"NCCL_SOCKET_IFNAME": "ib0"})],
            "auto",
            "NCCL_SOCKET_IFNAME=ib0 on node 1 (host1): no such interface (it has eth0, lo)",
        ),
    ],
)
def test_a_job_that_cannot_work_is_refused(hellos: list[dict[str, Any]], library: str, message: str) -> None:
    [problem] = plan.make(hellos, library).problems
    assert message in problem.what
    assert problem.fix


def test_another_python_does_not_matter() -> None:
    assert plan.make([hello(0), hello(1, versions=hello()["versions"] | {"python": "3.13.1"})], "auto").problems == ()


def test_ranks_on_one_machine_may_use_its_loopback() -> None:
    both = [hello(index, host="a", address="127.0.0.1") for index in range(2)]
    assert plan.make(both, "auto").problems == ()


def test_measured_sizes() -> None:
    assert plan.sizes("cpu", None)[-1] == 2**24
    assert plan.sizes("gpu", None)[-1] == 2**28
    assert plan.sizes("gpu", 2**20) == [2**10, 2**16, 2**20]
    assert plan.sizes("cpu", 1) == [2**10]


# ---- this machine


TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000  1000        0 11 1 0 100 0 0 10 0
   1: 020011AC:A4D2 030011AC:8E02 01 00000000:00000000 00:00000000 00000000  1000        0 12 1 0 20 4 30 10 -1
   2: 0100007F:9C40 0100007F:733C 01 00000000:00000000 00:00000000 00000000  1000        0 13 1 0 20 4 30 10 -1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue tr tm->when re
   0: 0000000000000000FFFF0000020011AC:1F90 0000000000000000FFFF0000030011AC:C350 01 0:0 00:0 0 1000 0 14 1 0 20
   1: B80D0120000000000000000001000000:1F90 B80D0120000000000000000002000000:C350 01 0:0 00:0 0 1000 0 15 1 0 20
"""


def test_established_connections_without_those_to_ignore() -> None:
    both = [("12", ("172.17.0.2", "172.17.0.3")), ("13", ("127.0.0.1", "127.0.0.1"))]
    assert machine.table_of_connections(TCP, set()) == both
    assert [inode for inode, _ in machine.table_of_connections(TCP, {0x733C})] == ["12"]


def test_connections_of_ipv6_and_of_mapped_ipv4() -> None:
    assert machine.table_of_connections(TCP6, set()) == [
        ("14", ("172.17.0.2", "172.17.0.3")),
        ("15", ("2001:db8::1", "2001:db8::2")),
    ]


@pytest.mark.parametrize(
    ("devices", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("0,-1,2", 1), ("GPU-1234,GPU-5678", 2), ("0,1,2,3,4,5", 4)],
)
def test_gpus_visible_to_cuda(monkeypatch: pytest.MonkeyPatch, devices: str | None, count: int) -> None:
    monkeypatch.setattr(machine, "_gpus_present", lambda: 4)
    assert machine.gpus({} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}) == count


def test_each_slice_of_a_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpus_present", lambda: 1)
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == 2


def test_cards_with_the_states_of_their_ports_and_their_device_files(tmp_path: Path) -> None:
    for port, state in (("1", "4: ACTIVE\n"), ("2", "1: DOWN\n")):
        folder = tmp_path / "sys/class/infiniband/mlx5_0/ports" / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    devices = tmp_path / "dev/infiniband"
    devices.mkdir(parents=True)
    for name in ("uverbs0", "rdma_cm"):
        (devices / name).touch()
    (devices / "uverbs1").mkdir()
    assert machine.infiniband(tmp_path) == {
        "cards": {"mlx5_0": ["ACTIVE", "DOWN"]},
        "devices": {"uverbs0": "", "uverbs1": "Is a directory"},
    }


def test_a_machine_without_cards(tmp_path: Path) -> None:
    assert machine.infiniband(tmp_path) == {"cards": {}, "devices": {}}


# ---- the log of NCCL


NVLINK = """\
node1:210:210 [0] NCCL INFO Bootstrap: Using eth0:10.0.0.5<0>
node1:210:210 [0] NCCL INFO NCCL version 2.27.5+cuda12.9
node1:210:260 [0] NCCL INFO NET/IB : No device found.
node1:210:260 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.5<0> [1]eth1:10.1.0.5<0>
node1:210:260 [0] NCCL INFO Using network Socket
node1:210:260 [0] NCCL INFO Pattern 4, crossNic 0, nChannels 12, bw 20.000000/20.000000, type NVL/PIX, sameChannels 1
node1:210:270 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
node1:210:270 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
INFINIBAND = """\
node1:986:986 [0] NCCL INFO Bootstrap : Using bond0:10.0.0.5<0>
node1:986:990 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/RoCE [RO]; OOB bond0:10.0.0.5<0>
node1:986:990 [0] NCCL INFO Using network IB
node1:986:990 [0] NCCL INFO Channel 00/0 : 8[0] -> 15[7] via P2P/IPC/read
node1:986:991 [0] NCCL INFO Channel 00/0 : 15[7] -> 0[0] [receive] via NET/IB/0/GDRDMA
node1:986:991 [0] NCCL INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
"""
TROUBLE = """\
a:1:1 [0] NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct
a:1:1 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [send] via NET/Socket/1
a:1:1 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-Fq3 to 33030532 bytes
a:1:1 [0] misc/shmutils.cc:87 NCCL WARN Error: failed to extend /dev/shm/nccl-Fq3 to 33030532 bytes
"""


@pytest.mark.parametrize(
    ("log", "parsed"),
    [
        (NVLINK, nccl.NcclLog("2.27.5", "eth0", "10.0.0.5", ("P2P over NVLink",), (), ())),
        (
            INFINIBAND,
            nccl.NcclLog(
                "",
                "bond0",
                "10.0.0.5",
                ("P2P", "NET/IB with GPUDirect RDMA"),
                ("mlx5_0 (IB)", "mlx5_1 (RoCE)"),
                (),
            ),
        ),
        (
            TROUBLE,
            nccl.NcclLog(
                transports=("SHM", "NET/Socket"),
                warnings=("Error: failed to extend /dev/shm/nccl-Fq3 to 33030532 bytes",),
            ),
        ),
        ("Channel of another kind via NET\nBootstrap\n", nccl.NcclLog()),
    ],
    ids=["NVLink", "InfiniBand with direct access", "shared memory, sockets and warnings", "unknown lines"],
)
def test_the_log_of_nccl(log: str, parsed: nccl.NcclLog) -> None:
    assert nccl.parse(log) == parsed


# ---- the verdict


@pytest.mark.parametrize(("world", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_is_that_of_one_link(world: int, factor: float) -> None:
    assert judge.bus_factor(world) == factor


def test_success() -> None:
    report = report_of(result(0), result(1))
    assert report["ok"]
    assert report["problems"] == report["notes"] == []
    assert [rank["interfaces"] for rank in report["ranks"]] == [["eth0"], ["eth0"]]
    assert report["checks"] == [{"dtype": "float32", "elements": 1000, "wrong_ranks": []}]


def test_connections_are_not_the_transport_of_nccl() -> None:
    both = [hello(index, gpus=1) for index in range(2)]
    report = judge.report(both, plan.make(both, "auto"), "nccl", [result(0), result(1)], [], timeout=60)
    assert [rank["transports"] for rank in report["ranks"]] == [[], []]


def test_the_slowest_rank_determines_the_bandwidth() -> None:
    report = report_of(result(0), result(1, measured=[{"bytes": 2**20, "seconds": 0.004}]))
    assert report["bandwidth"] == [
        {"bytes": 2**20, "seconds": 0.004, "algorithm": 2**20 / 0.004, "bus": 2**20 / 0.004}  # two ranks: factor 1
    ]


WRONG = {"dtype": "float32", "elements": 1000, "wrong": 3, "sample": "element 7 is 2, not 3"}
BROKEN = {"state": "failed", "stage": "connecting", "error": "RuntimeError: x", "log": "Duplicate GPU detected"}
STUCK = {"state": "stuck", "stage": "connecting"}


@pytest.mark.parametrize(
    ("results", "what"),
    [
        (
            [result(0), result(1, checks=[WRONG])],
            ["rank 1 got a wrong sum of 1000 float32 values: element 7 is 2, not 3"],
        ),
        ([result(0)], ["rank 1 did not finish"]),
        (
            [result(0, **BROKEN), result(1, **BROKEN)],
            ["ranks 0, 1: two ranks use the same GPU, which NCCL refuses"],
        ),
        (
            [result(0, state="failed", stage="connecting", error="ValueError: odd"), result(1, state="stuck")],
            ["rank 0: ValueError: odd (while connecting)"],
        ),
        ([result(0, **STUCK), result(1, **STUCK)], ["ranks 0, 1 made no progress for 60 s while connecting"]),
    ],
    ids=["a wrong sum", "no result", "a known cause, once", "those that wait are not named", "hanging"],
)
def test_the_causes_of_a_failure(results: list[dict[str, Any]], what: list[str]) -> None:
    report = report_of(*results)
    assert not report["ok"]
    assert causes(report["problems"]) == what


def test_ranks_without_checks_are_a_failure() -> None:
    assert not report_of(result(0, checks=[]), result(1, checks=[]))["ok"]


def test_data_on_an_unexpected_interface_is_noted() -> None:
    two = [hello(index, interfaces={"eth0": f"10.0.0.{index + 5}", "docker0": "172.17.0.1"}) for index in range(2)]
    over = [result(rank, connections=[["172.17.0.1", "172.17.0.9"]]) for rank in range(2)]
    report = report_of(*over, hellos=two)
    assert report["ok"]
    assert causes(report["notes"])[0] == "data used docker0, but the route to the first node is eth0"
    assert "GLOO_SOCKET_IFNAME=eth0" in report["notes"][0]["fix"][0]


# ---- advice


@pytest.mark.parametrize(
    ("reason", "advised"),
    [
        ("Connection refused", "start dist-check with --rank 0"),
        ("timed out", "firewalls"),
        ("Name or service not known", "use the IP address"),
        ("No route to host", "same Docker network"),
    ],
)
def test_a_first_node_that_cannot_be_reached(reason: str, advised: str) -> None:
    problem = advice.no_meeting("10.0.0.5:29500", reason, 10)
    assert reason in problem.what
    assert any(advised in fix for fix in problem.fix)


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes", "shared memory"),
        ("DataLoader worker is killed by signal: Bus error", "shared memory"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "lock memory"),
        ("NCCL WARN Bootstrap : no socket interface found", "interface"),
        ("[enforce fail at external/gloo/gloo/transport/tcp/device.cc:99] rv == 0. -3 vs 0", "own name"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is too old"),
        ("Error 802: system not yet initialized", "NVSwitch"),
        ("torch.OutOfMemoryError: CUDA out of memory", "no memory left"),
        ("The server socket has failed to bind to ?UNKNOWN? port 29501: EADDRINUSE", "another program uses the port"),
        ("ModuleNotFoundError: No module named 'torch'", "does not load"),
        ("killed by signal 9", "out of memory"),
    ],
)
def test_known_causes(log: str, cause: str) -> None:
    known = advice.known(f"some line\n{log}\n")
    assert known is not None
    assert cause in known.what
    assert known.fix


def test_an_unknown_cause() -> None:
    assert advice.known("ValueError: something else") is None


@pytest.mark.parametrize(
    ("name", "value", "is_valid"),
    [
        ("NCCL_SOCKET_IFNAME", "eth", True),  # a prefix
        ("NCCL_SOCKET_IFNAME", "=eth", False),
        ("NCCL_SOCKET_IFNAME", "=eth0", True),
        ("NCCL_SOCKET_IFNAME", "^docker", True),
        ("NCCL_SOCKET_IFNAME", "ib,eth", True),
        ("GLOO_SOCKET_IFNAME", "eth", False),
        ("GLOO_SOCKET_IFNAME", "eth0", True),
        ("GLOO_SOCKET_IFNAME", "", True),
    ],
)
def test_variables_that_name_an_interface(name: str, value: str, is_valid: bool) -> None:
    assert (advice.interface_variables("node 0", {name: value}, ["lo", "eth0"]) == []) is is_valid


def noted(on_gpus: bool = True, transports: tuple[str, ...] = (), **other: Any) -> list[Problem]:
    return advice.notes([hello(0, **other), hello(1)], on_gpus=on_gpus, transports=transports)


def test_small_shared_memory_is_noted_once_per_machine() -> None:
    small = [hello(index, host="a", shm_bytes=64 * 2**20) for index in range(2)]
    [note] = advice.notes(small, on_gpus=False, transports=[])
    assert "64 MiB" in note.what
    assert "--shm-size" in note.fix[0]


def of_card(**other: Any) -> dict[str, Any]:
    """A node with a card that NCCL can use."""
    usable = {"cards": {"mlx5_0": ["ACTIVE"]}, "devices": {"uverbs0": ""}, "verbs": ["mlx5_0"]}
    return {"infiniband": usable | other}


DOCKER = "docker run --network host --device=/dev/infiniband --ulimit memlock=-1"
LIBRARIES = "apt-get install libibverbs1 ibverbs-providers"


@pytest.mark.parametrize(
    ("facts", "memlock", "missing", "fixes"),
    [
        (
            {"devices": {}},
            None,
            "no /dev/infiniband in the container",
            [DOCKER, "Compose: ", "Kubernetes: ", "Slurm: "],
        ),
        (
            {"devices": {"uverbs0": "Permission denied"}},
            None,
            "/dev/infiniband/uverbs0: Permission denied",
            [DOCKER, "Compose: ", "Kubernetes: ", "Slurm: "],
        ),
        ({}, 65536, "only 64 KiB may be locked (ulimit -l)", [DOCKER, "Compose: ", "Kubernetes: ", "Slurm: "]),
        ({"verbs": None}, None, "no libibverbs.so.1 in the image", [LIBRARIES]),
        ({"verbs": []}, None, "libibverbs has no library for them", [LIBRARIES]),
        (
            {"devices": {}, "verbs": None},
            65536,
            "no /dev/infiniband in the container; only 64 KiB may be locked (ulimit -l); "
            "no libibverbs.so.1 in the image",
            [DOCKER, "Compose: ", "Kubernetes: ", "Slurm: ", LIBRARIES],
        ),
    ],
)
def test_all_that_infiniband_lacks_is_noted_with_the_flags(
    facts: dict[str, Any], memlock: int | None, missing: str, fixes: list[str]
) -> None:
    [note] = noted(**of_card(**facts), memlock=memlock, transports=("NET/Socket",))
    assert note.what == f"node 0 (host0): has mlx5_0, which NCCL cannot use: {missing}"
    assert len(note.fix) == len(fixes)
    assert all(expected in fix for expected, fix in zip(fixes, note.fix, strict=True))


def test_one_card_with_a_device_file_is_enough() -> None:
    assert noted(**of_card(devices={"uverbs0": "", "uverbs1": "Operation not permitted"})) == []


def test_a_card_without_an_active_port_is_noted_with_its_state() -> None:
    [note] = noted(**of_card(cards={"mlx5_0": ["DOWN"], "mlx5_1": ["INIT"]}), transports=("NET/Socket",))
    assert note.what.endswith("has mlx5_0, mlx5_1, but no port is active: mlx5_0 DOWN, mlx5_1 INIT")
    assert noted(**of_card(cards={"mlx5_0": ["DOWN"], "mlx5_1": ["ACTIVE"]})) == []


def test_a_usable_card_is_noted_only_if_nccl_used_sockets() -> None:
    [note] = noted(**of_card(), transports=("NET/Socket",))
    assert note.what == "node 0 (host0): has mlx5_0, but NCCL used sockets"
    assert any("--network host" in fix for fix in note.fix)
    assert noted(**of_card(), transports=("NET/IB with GPUDirect RDMA",)) == []
    assert noted(**of_card(), memlock=65536, transports=("NET/IB",)) == [], "it works"


def test_infiniband_does_not_matter_without_gpus_or_on_one_node() -> None:
    assert noted(on_gpus=False, **of_card(devices={})) == []
    assert advice.notes([hello(0, **of_card(devices={}))], on_gpus=True, transports=()) == []
    assert noted(infiniband=hello()["infiniband"], memlock=65536, transports=("NET/Socket",)) == [], "no card"


# ---- absent members


def absent(members: int, *, nodes_are_ranks: bool, processes: int) -> list[str]:
    order = Order("auto", 10, None, {}, "10.0.0.5:29500", nodes_are_ranks, processes)
    with socket.socket() as unused:
        meeting = Meeting(unused, members, order)
        meeting._hellos[0] = hello(0)
        problems = meeting._absent()
    assert all(problem.fix for problem in problems)
    return [problem.what for problem in problems]


def test_absent_ranks_and_nodes_are_named() -> None:
    late = "did not connect to 10.0.0.5:29500 within 10 s"
    assert absent(3, nodes_are_ranks=True, processes=1) == [f"rank 1 {late}", f"rank 2 {late}"]
    assert absent(2, nodes_are_ranks=False, processes=4) == [f"node 1 (ranks 4, 5, 6, 7) {late}"]


# ---- the report as text


def test_text_of_a_report() -> None:
    text = show.text(report_of(result(0), result(1)))
    assert "2 ranks on 2 nodes" in text
    assert "library: gloo (no GPU is visible here)" in text
    assert "1     host1  cpu     eth0 10.0.0.6  TCP" in text
    assert "sum of float32  exact for 1000 values" in text
    assert "1 MiB          1.000 ms  1.05 GB/s  1.05 GB/s" in text
    assert text.endswith("ok: 2 ranks got every sum right")


def test_a_single_rank_is_noted_and_has_no_rates() -> None:
    """It printed 11039 GB/s, of data that went nowhere."""
    report = report_of(result(0), hellos=[hello(0)])
    assert report["ok"]
    assert causes(report["notes"]) == ["only one rank: no data was sent"]
    assert "1 MiB          1.000 ms  -     -\n" in show.text(report)


def test_text_of_a_failure_has_logs_and_ends_with_the_verdict() -> None:
    stuck = result(1, state="stuck", stage="connecting", log="some line")
    lines = show.text(report_of(result(0), stuck)).splitlines()
    assert "problem: rank 1 made no progress for 60 s while connecting" in lines
    assert "    some line" in lines
    assert lines[-1] == "failed"


def test_text_if_nothing_was_computed() -> None:
    text = show.text(judge.unstarted([], [Problem("no way", ("do this", "do that"))], "a:1"))
    assert text == "problem: no way\n    fix: do this\n     or: do that\nfailed: nothing was computed"
