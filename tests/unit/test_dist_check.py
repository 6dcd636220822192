"""dist-check, as far as it is pure; that it finds a wrong sum, an absent rank and its way is tested in every image."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

import pytest

from templates.base.files.usr.local.lib.dist_check import advice, cli, judge, machine, nccl, plan, show, where
from templates.base.files.usr.local.lib.dist_check.advice import Problem
from templates.base.files.usr.local.lib.dist_check.meeting import Meeting, Order
from templates.base.files.usr.local.lib.dist_check.where import Place, Unclear


def hello(index: int = 0, **other: Any) -> dict[str, Any]:
    """What a member with one rank, no GPU and nothing unusual says."""
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
        "infiniband_cards": [],
        "infiniband_device": False,
        **other,
    }


def result(rank: int, **other: Any) -> dict[str, Any]:
    """Of a rank that did everything right."""
    return {
        "rank": rank,
        "state": "done",
        "stage": "done",
        "device": "cpu",
        "log": "",
        "nccl": vars(nccl.Told()),
        "connections": [[f"10.0.0.{rank + 5}", f"10.0.0.{6 - rank}"]],
        "checks": [{"dtype": "float32", "elements": 1000, "wrong": 0}],
        "measured": [{"bytes": 2**20, "seconds": 0.001}],
        **other,
    }


def judged(*results: Mapping[str, Any], hellos: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    both = hellos or [hello(0), hello(1)]
    return judge.report(both, plan.make(both, "auto"), "gloo", results, [], timeout=60)


def whats(found: list[dict[str, Any]]) -> list[str]:
    return [one["what"] for one in found]


# ---- who is who


def found(environment: dict[str, str], **options: Any) -> Place:
    asked = {"nodes": None, "rank": None, "master": None, "processes": None} | options
    return where.find(**asked, environment=environment)


def test_without_anything_it_is_this_machine_alone() -> None:
    assert found({}) == Place(0, 1, "127.0.0.1", 0, None, 0, "this machine alone")


def test_options_count_more_than_a_launcher() -> None:
    place = found({"RANK": "5", "WORLD_SIZE": "8"}, nodes=2, rank=1, master="a:1234", processes=4)
    assert (place.index, place.members, place.host, place.port, place.processes) == (1, 2, "a", 1234, 4)


def test_torchrun_listens_on_its_port_itself() -> None:
    variables = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "2000"}
    started = found(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert started == Place(3, 4, "a", 2001, 1, 1, "torchrun")
    assert found(variables).port == 2000


def test_slurm() -> None:
    place = found(
        {
            "SLURM_PROCID": "9",
            "SLURM_NTASKS": "16",
            "SLURM_LOCALID": "1",
            "SLURM_JOB_NODELIST": "gpu[03-04]",
            "SLURM_JOB_ID": "1234567",
        }
    )
    assert place == Place(9, 16, "gpu03", 24567, 1, 1, "Slurm")


def test_slurm_of_one_task_is_this_machine_alone() -> None:
    assert found({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}).alone


@pytest.mark.parametrize(
    ("listed", "first"),
    [("gpu01", "gpu01"), ("gpu[03-07,12],login1", "gpu03"), ("a,b", "a"), ("r1n[8,9]-ib", "r1n8-ib"), ("", "")],
)
def test_first_host_of_slurms_list(listed: str, first: str) -> None:
    assert where.first_host(listed) == first


def test_indexed_job_needs_only_the_first_pods_address() -> None:
    variables = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "job-0.svc"}
    assert found(variables) == Place(2, 4, "job-0.svc", 29500, None, 0, "Indexed Job")


@pytest.mark.parametrize(
    ("environment", "options", "says"),
    [
        ({}, {"nodes": 2}, "--rank and --master"),
        ({}, {"nodes": 2, "rank": 2, "master": "a"}, "ranks are 0 to 1"),
        ({}, {"nodes": 2, "rank": 1, "master": "a:0"}, "host:port"),
        ({}, {"nodes": 2, "rank": 1, "master": "tcp://a:1"}, "host:port"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, {}, "MASTER_ADDR"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {}, "0 to WORLD_SIZE-1"),
        ({"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {}, "no number"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, {"processes": 2}, "leave -n out"),
        ({"JOB_COMPLETION_INDEX": "1"}, {}, "WORLD_SIZE and MASTER_ADDR"),
    ],
)
def test_what_is_unclear_is_refused(environment: dict[str, str], options: dict[str, Any], says: str) -> None:
    with pytest.raises(Unclear, match=says):
        found(environment, **options)


@pytest.mark.parametrize(
    ("text", "expected"), [("a", ("a", 29500)), ("10.0.0.5:1", ("10.0.0.5", 1)), ("[fe80::1]:80", ("fe80::1", 80))]
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert where.address(text) == expected
    assert where.address(where.joined(*expected)) == expected


@pytest.mark.parametrize(("text", "count"), [("64M", 2**26), ("1K", 1024), ("512", 512), ("2GiB", 2**31)])
def test_sizes_that_people_write(text: str, count: int) -> None:
    assert cli._bytes(text) == count


# ---- the plan


def test_ranks_are_numbered_by_machine_and_get_its_gpus() -> None:
    made = plan.make([hello(0, gpus=2, processes=2), hello(1, gpus=3, processes=3)], "auto")
    assert made.library == "gpu"
    assert made.problems == ()
    assert [(one.rank, one.member, one.device, one.port) for one in made.ranks] == [
        (0, 0, 0, 29501),
        (1, 0, 1, 29502),
        (2, 1, 0, 29501),
        (3, 1, 1, 29502),
        (4, 1, 2, 29503),
    ]
    assert [one.rank for one in made.of_member(1)] == [2, 3, 4]


def test_a_task_that_sees_only_its_own_gpu_takes_that() -> None:
    assert plan.make([hello(0, gpus=1, first_device=3)], "auto").ranks[0].device == 0


def test_without_gpus_the_cpu_is_taken_and_named() -> None:
    made = plan.make([hello(0), hello(1)], "auto")
    assert (made.library, made.why, made.problems) == ("cpu", "no GPU is visible here", ())


def test_cpu_can_be_asked_for_on_gpus() -> None:
    made = plan.make([hello(0, gpus=1, processes=4)], "gloo")
    assert made.library == "cpu"
    assert made.problems == ()


@pytest.mark.parametrize(
    ("hellos", "asked", "says"),
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
        ([hello(0, address="127.0.1.1"), hello(1)], "auto", "node 0 (host0) would tell the others"),
        (
            [hello(0), hello(1, variables={"NCCL_SOCKET_IFNAME": "ib0"})],
            "auto",
            "NCCL_SOCKET_IFNAME=ib0 on node 1 (host1): it has no such interface, but eth0, lo",
        ),
    ],
)
def test_what_makes_no_sense_to_start(hellos: list[dict[str, Any]], asked: str, says: str) -> None:
    problems = plan.make(hellos, asked).problems
    assert len(problems) == 1
    assert says in problems[0].what
    assert problems[0].fix


def test_another_python_does_not_matter() -> None:
    assert plan.make([hello(0), hello(1, versions=hello()["versions"] | {"python": "3.13.1"})], "auto").problems == ()


def test_ranks_of_a_launcher_on_one_machine_may_meet_at_its_loopback() -> None:
    both = [hello(index, host="a", address="127.0.0.1") for index in range(2)]
    assert plan.make(both, "auto").problems == ()


def test_sizes_that_are_measured() -> None:
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


def test_connections_are_the_established_ones_but_those_to_ignore() -> None:
    assert machine.table_of_connections(TCP, set()) == [
        ("12", ("172.17.0.2", "172.17.0.3")),
        ("13", ("127.0.0.1", "127.0.0.1")),
    ]
    assert [inode for inode, _ in machine.table_of_connections(TCP, {0x733C})] == ["12"]


def test_connections_of_ipv6_and_of_ipv4_in_it() -> None:
    assert machine.table_of_connections(TCP6, set()) == [
        ("14", ("172.17.0.2", "172.17.0.3")),
        ("15", ("2001:db8::1", "2001:db8::2")),
    ]


@pytest.mark.parametrize(
    ("chosen", "count"),
    [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("0,-1,2", 1), ("GPU-1234,GPU-5678", 2), ("0,1,2,3,4,5", 4)],
)
def test_gpus_are_those_that_cuda_may_see(monkeypatch: pytest.MonkeyPatch, chosen: str | None, count: int) -> None:
    monkeypatch.setattr(machine, "_gpus_present", lambda: 4)
    assert machine.gpus({} if chosen is None else {"CUDA_VISIBLE_DEVICES": chosen}) == count


def test_parts_of_a_gpu_count_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpus_present", lambda: 1)
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": "MIG-a,MIG-b"}) == 2


# ---- what NCCL says


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


def test_nccl_over_nvlink() -> None:
    told = nccl.parse(NVLINK)
    assert told == nccl.Told("2.27.5", "eth0", "10.0.0.5", ("P2P over NVLink",), (), ())


def test_nccl_over_infiniband_with_direct_access() -> None:
    told = nccl.parse(INFINIBAND)
    assert (told.interface, told.address) == ("bond0", "10.0.0.5")
    assert told.transports == ("P2P", "NET/IB with GPUDirect RDMA")
    assert told.cards == ("mlx5_0 (IB)", "mlx5_1 (RoCE)")


def test_nccl_over_shared_memory_and_sockets_and_its_warnings() -> None:
    told = nccl.parse(TROUBLE)
    assert told.transports == ("SHM", "NET/Socket")
    assert told.warnings == ("Error: failed to extend /dev/shm/nccl-Fq3 to 33030532 bytes",)


def test_what_is_not_understood_says_nothing() -> None:
    assert nccl.parse("") == nccl.parse("Channel of another kind via NET\nBootstrap\n") == nccl.Told()


# ---- the verdict


@pytest.mark.parametrize(("world", "factor"), [(1, 0), (2, 1), (4, 1.5), (8, 1.75)])
def test_bus_bandwidth_counts_what_the_slowest_link_moves(world: int, factor: float) -> None:
    assert judge.bus_factor(world) == factor


def test_all_right() -> None:
    report = judged(result(0), result(1))
    assert report["ok"]
    assert report["problems"] == report["notes"] == []
    assert [rank["interfaces"] for rank in report["ranks"]] == [["eth0"], ["eth0"]]
    assert report["checks"] == [{"dtype": "float32", "elements": 1000, "wrong_ranks": []}]


def test_one_rank_alone_is_noted() -> None:
    report = judged(result(0), hellos=[hello(0)])
    assert report["ok"]
    assert whats(report["notes"]) == ["one rank alone: no data went anywhere"]


def test_nccl_s_connections_are_not_taken_for_its_transport() -> None:
    both = [hello(index, gpus=1) for index in range(2)]
    report = judge.report(both, plan.make(both, "auto"), "nccl", [result(0), result(1)], [], timeout=60)
    assert [rank["transports"] for rank in report["ranks"]] == [[], []]


def test_the_slowest_rank_counts() -> None:
    report = judged(result(0), result(1, measured=[{"bytes": 2**20, "seconds": 0.004}]))
    assert report["bandwidth"] == [
        {"bytes": 2**20, "seconds": 0.004, "algorithm": 2**20 / 0.004, "bus": 2**20 / 0.004}  # two ranks: factor 1
    ]


def test_a_wrong_sum_names_ranks_and_type() -> None:
    check = {"dtype": "float32", "elements": 1000, "wrong": 3, "sample": "element 7 is 2, not 3"}
    report = judged(result(0), result(1, checks=[check]))
    assert not report["ok"]
    assert report["checks"][0]["wrong_ranks"] == [1]
    assert whats(report["problems"]) == ["rank 1 got a wrong sum of 1000 float32 values: element 7 is 2, not 3"]
    assert "WRONG: 1000 wrong on ranks [1]" in show.text(report)


def test_a_rank_that_nobody_heard_of_is_no_success() -> None:
    report = judged(result(0))
    assert not report["ok"]
    assert whats(report["problems"]) == ["rank 1 did not finish"]
    assert report["bandwidth"] == []


def test_ranks_that_compared_nothing_are_no_success() -> None:
    assert not judged(result(0, checks=[]), result(1, checks=[]))["ok"]


def test_a_cause_that_is_known_is_told_once_for_all_ranks() -> None:
    broken = {"state": "failed", "stage": "connecting", "error": "RuntimeError: x", "log": "Duplicate GPU detected"}
    report = judged(result(0, **broken), result(1, **broken))
    assert whats(report["problems"]) == ["ranks 0, 1: two ranks were given the same GPU, which NCCL refuses"]


def test_a_failed_rank_explains_those_that_wait_for_it() -> None:
    failed = result(0, state="failed", stage="connecting", error="ValueError: odd")
    report = judged(failed, result(1, state="stuck", stage="adding up"))
    assert whats(report["problems"]) == ["rank 0: ValueError: odd (while connecting)"]


def test_ranks_that_hang_are_named_with_what_they_did() -> None:
    report = judged(result(0, state="stuck", stage="connecting"), result(1, state="stuck", stage="connecting"))
    assert whats(report["problems"]) == ["ranks 0, 1 stopped answering while connecting, for 60 s"]
    assert any("GLOO_SOCKET_IFNAME" in fix for fix in report["problems"][0]["fix"])


def test_data_on_another_interface_than_expected_is_noted() -> None:
    two = [hello(index, interfaces={"eth0": f"10.0.0.{index + 5}", "docker0": "172.17.0.1"}) for index in range(2)]
    over = [result(rank, connections=[["172.17.0.1", "172.17.0.9"]]) for rank in range(2)]
    report = judged(*over, hellos=two)
    assert report["ok"]
    assert whats(report["notes"])[0] == "data went over docker0, while the way to the first node is eth0"
    assert "GLOO_SOCKET_IFNAME=eth0" in report["notes"][0]["fix"][0]


# ---- advice


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("Connection refused", "start the one with --rank 0"),
        ("timed out", "firewalls"),
        ("Name or service not known", "give the IP address"),
        ("No route to host", "same Docker network"),
    ],
)
def test_a_first_node_that_cannot_be_reached(reason: str, says: str) -> None:
    problem = advice.no_meeting("10.0.0.5:29500", reason, 10)
    assert reason in problem.what
    assert any(says in fix for fix in problem.fix)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        ("NCCL WARN Error: failed to extend /dev/shm/nccl-x to 33030532 bytes", "shared memory"),
        ("DataLoader worker is killed by signal: Bus error", "shared memory"),
        ("NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory", "lock memory"),
        ("NCCL WARN Bootstrap : no socket interface found", "interface"),
        ("[enforce fail at external/gloo/gloo/transport/tcp/device.cc:99] rv == 0. -3 vs 0", "own name"),
        ("CUDA driver version is insufficient for CUDA runtime version", "driver is too old"),
        ("Error 802: system not yet initialized", "NVSwitch"),
        ("torch.OutOfMemoryError: CUDA out of memory", "no memory left"),
        ("The server socket has failed to bind to ?UNKNOWN? port 29501: EADDRINUSE", "a port was taken"),
        ("ModuleNotFoundError: No module named 'torch'", "does not load"),
        ("ended by signal 9", "killed"),
    ],
)
def test_known_causes(log: str, says: str) -> None:
    known = advice.known(f"some line\n{log}\n")
    assert known is not None
    assert says in known.what
    assert known.fix


def test_an_unknown_cause_is_not_guessed() -> None:
    assert advice.known("ValueError: something else") is None


@pytest.mark.parametrize(
    ("name", "value", "right"),
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
def test_variables_that_name_an_interface(name: str, value: str, right: bool) -> None:
    assert (advice.interface_variables("node 0", {name: value}, ["lo", "eth0"]) == []) is right


def noted(on_gpus: bool = True, transports: tuple[str, ...] = (), **other: Any) -> list[Problem]:
    return advice.notes([hello(0, **other), hello(1)], on_gpus=on_gpus, transports=transports)


def test_small_shared_memory_is_noted_once_for_a_machine() -> None:
    small = [hello(index, host="a", shm_bytes=64 * 2**20) for index in range(2)]
    (note,) = advice.notes(small, on_gpus=False, transports=[])
    assert "64 MiB" in note.what
    assert "--shm-size" in note.fix[0]


def test_infiniband_that_is_not_used_is_noted_with_the_reason() -> None:
    card: dict[str, Any] = {"infiniband_cards": ["mlx5_0"]}
    assert [note.what for note in noted(**card)] == [
        "node 0 (host0): has mlx5_0, but no /dev/infiniband in the container, so it is not used"
    ]
    assert "may be locked" in noted(**card, infiniband_device=True, memlock=65536)[0].what
    assert "sockets" in noted(**card, infiniband_device=True, transports=("NET/Socket",))[0].what
    assert noted(**card, infiniband_device=True, transports=("NET/IB",)) == []
    assert noted(on_gpus=False, **card) == []


# ---- who did not come


def absent(members: int, *, nodes_are_ranks: bool, processes: int) -> list[str]:
    order = Order("auto", 10, None, {}, "10.0.0.5:29500", nodes_are_ranks, processes)
    with socket.socket() as unused:
        meeting = Meeting(unused, members, order)
        meeting._hellos[0] = hello(0)
        problems = meeting._absent()
    assert all(problem.fix for problem in problems)
    return [problem.what for problem in problems]


def test_absent_ranks_are_named() -> None:
    assert absent(3, nodes_are_ranks=True, processes=1) == [
        "rank 1 did not come to 10.0.0.5:29500 within 10 s",
        "rank 2 did not come to 10.0.0.5:29500 within 10 s",
    ]


def test_absent_nodes_are_named_with_their_ranks() -> None:
    assert absent(2, nodes_are_ranks=False, processes=4) == [
        "node 1 (ranks 4, 5, 6, 7) did not come to 10.0.0.5:29500 within 10 s"
    ]


# ---- what people read


def test_text_of_a_report() -> None:
    text = show.text(judged(result(0), result(1)))
    assert "2 ranks on 2 nodes" in text
    assert "library: gloo (no GPU is visible here)" in text
    assert "1     host1  cpu     eth0 10.0.0.6  TCP" in text
    assert "sum of float32  exact for 1000 values" in text
    assert "1 MiB          1.000 ms  1.05 GB/s  1.05 GB/s" in text
    assert text.endswith("ok: 2 ranks got every sum right")


def test_text_of_trouble_ends_with_the_verdict_and_shows_logs() -> None:
    stuck = result(1, state="stuck", stage="connecting", log="last words")
    lines = show.text(judged(result(0), stuck)).splitlines()
    assert "problem: rank 1 stopped answering while connecting, for 60 s" in lines
    assert "    last words" in lines
    assert lines[-1] == "failed"


def test_text_when_nothing_was_computed() -> None:
    text = show.text(judge.unstarted([], [Problem("no way", ("do this", "do that"))], "a:1"))
    assert text == "problem: no way\n    fix: do this\n     or: do that\nfailed: nothing was computed"
