"""Objects of Kubernetes: valid by the API's schemas, without a field that is unknown, and each option's effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from builder import deploy_k8s
from builder.deploy_k8s import Place
from builder.errors import UsageError
from tests.unit.deployed import HOSTILE, expanded, of_kind, pod, subject, wish

OLDEST, NEWEST = "1.29", "1.35"
VARIANTS = ["jupyter", "ssh", "full"]
TRAIN = ("train.py", "--epochs", "3")


@pytest.fixture(autouse=True, scope="module")
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kubernetes_validate.utils.schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def valid(text: str) -> list[dict[str, Any]]:
    """The objects. Each passes the schemas of the oldest and of a new Kubernetes, and refers to what is there."""
    found = list(yaml.safe_load_all(text))
    for one in found:
        for version in (OLDEST, NEWEST):
            assert kubernetes_validate.validate(one, version, strict=True) == version
    for one in found:
        if one["kind"] in ("Job", "Deployment"):
            refers(one, found)
    return found


def refers(workload: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """What no schema knows: names of ports, volumes, claims and labels."""
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert [one["name"] for one in container["volumeMounts"]] == [one["name"] for one in template["spec"]["volumes"]]
    claims = [one["metadata"]["name"] for one in found if one["kind"] == "PersistentVolumeClaim"]
    (used,) = [one["persistentVolumeClaim"] for one in template["spec"]["volumes"] if "persistentVolumeClaim" in one]
    assert [used["claimName"]] == (claims or [used["claimName"]])
    # Kubernetes gives a job's pods the label, and their host names.
    labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": workload["metadata"]["name"]}
    for service in (one for one in found if one["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {one["name"] for one in container.get("ports", ())}
        assert {one["targetPort"] for one in service["spec"].get("ports", ())} == ports
    if "selector" in workload["spec"]:
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def k8s(
    variant: str = "", place: Place | None = None, *, framework: str = "pytorch", cpu: bool = False, **wanted: Any
) -> str:
    text = deploy_k8s.render(subject(variant, framework=framework, cpu=cpu), wish(**wanted), place or Place())
    valid(text)
    return text


def container(text: str, kind: str = "Job") -> dict[str, Any]:
    (found,) = pod(text, kind)["containers"]
    assert isinstance(found, dict)
    return found


def environment(text: str, kind: str = "Job", index: int = 0) -> dict[str, str]:
    """Variables as a container sees them; of a secret, its name and key."""
    found: dict[str, str] = {}
    for one in container(text, kind).get("env", ()):
        if "value" in one:
            found[one["name"]] = expanded(one["value"], found)
        elif "secretKeyRef" in one["valueFrom"]:
            found[one["name"]] = "{name}/{key}/{optional}".format(**one["valueFrom"]["secretKeyRef"])
        else:
            path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            assert one["valueFrom"] == {"fieldRef": {"fieldPath": path}}
            found[one["name"]] = str(index)
    return found


def test_the_schemas_refuse_what_kubernetes_would() -> None:
    """Else the other tests would pass with anything."""
    job = of_kind(k8s(command=TRAIN), "Job")
    for change in ({"backoffLimits": 1}, {"backoffLimit": "1"}, {"completionMode": 1}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job | {"spec": job["spec"] | change}, NEWEST, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gpus", [0, 4])
def test_services(variant: str, gpus: int) -> None:
    text = k8s(variant, gpus=gpus)
    assert [one["kind"] for one in yaml.safe_load_all(text)] == ["PersistentVolumeClaim", "Service", "Deployment"]
    found = container(text, "Deployment")
    assert "args" not in found
    assert "command" not in found, "the image's entrypoint is tini and the launcher"
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert found[probe]["exec"] == {"command": ["/usr/local/bin/check-services"]}
    assert of_kind(text, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert found.get("resources") == ({"limits": {"nvidia.com/gpu": "4"}} if gpus else None)


def test_the_service_has_the_ports_of_the_image_and_the_pod_ports_that_a_user_may_have() -> None:
    text = k8s("full")
    ports = [(one["name"], one["port"]) for one in of_kind(text, "Service")["spec"]["ports"]]
    assert ports == [("jupyter", 8888), ("ssh", 22)]
    listening = [(one["name"], one["containerPort"]) for one in container(text, "Deployment")["ports"]]
    assert listening == [("jupyter", 8888), ("ssh", 2222)]
    assert "port-forward service/train 8888:8888 2222:22" in text


def test_logins_are_in_a_secret_that_a_person_makes() -> None:
    text = k8s("full")
    assert "Secret" not in [one["kind"] for one in yaml.safe_load_all(text)]
    assert environment(text, "Deployment") == {
        "GPU_REQUIRED": "1",
        "JUPYTER_TOKEN": "train-login/jupyter-token/True",
        "SSH_PUBLIC_KEY": "train-login/ssh-public-key/True",
        "SSH_PORT": "2222",
    }
    assert "create secret generic train-login --from-literal=jupyter-token=" in text
    # An SSH server without a key would be no service at all: the pod waits for it instead.
    assert environment(k8s("ssh"), "Deployment")["SSH_PUBLIC_KEY"] == "train-login/ssh-public-key/False"


@pytest.mark.parametrize(
    ("variant", "wanted"),
    [("full", {}), ("", {"command": TRAIN}), ("full", {"command": TRAIN}), ("", {"command": TRAIN, "nodes": 3})],
)
def test_no_pod_is_root_or_can_become_it(variant: str, wanted: dict[str, Any]) -> None:
    text = k8s(variant, **wanted)
    kind = "Job" if wanted else "Deployment"
    spec = pod(text, kind)
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 0,
        "fsGroup": 0,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container(text, kind)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False, "a Service `jupyter` would set JUPYTER_PORT to an address"
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    paths = [one["mountPath"] for one in container(text, kind)["volumeMounts"]]
    assert paths[:4] == ["/workspace", "/dev/shm", "/home/user", "/tmp"]


def test_shared_memory_is_memory_and_has_a_limit() -> None:
    volumes = {one["name"]: one for one in pod(k8s(command=TRAIN, shm=16 * 10**9), "Job")["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16G"}


def test_one_job() -> None:
    text = k8s(command=("train.py", "--epochs", "3"), gpus=2, cpus=8, memory=64 * 10**9)
    spec = of_kind(text, "Job")["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (2, "Failed")
    assert "completionMode" not in spec
    assert "Service" not in [one["kind"] for one in yaml.safe_load_all(text)]
    found = container(text)
    assert found["args"] == ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "--epochs", "3"]
    amounts = {"cpu": "8", "memory": "64G"}
    assert found["resources"] == {"limits": amounts | {"nvidia.com/gpu": "2"}, "requests": amounts}
    (toleration,) = pod(text, "Job")["tolerations"]
    assert toleration["key"] == "nvidia.com/gpu"
    assert "tolerations" not in pod(k8s(command=TRAIN, cpu=True, gpus=0), "Job")


def test_several_nodes_with_torchrun() -> None:
    text = k8s(command=TRAIN, nodes=4, gpus=8)
    kinds = [one["kind"] for one in yaml.safe_load_all(text)]
    assert kinds == ["PersistentVolumeClaim", "Service", "NetworkPolicy", "Job"]
    spec = of_kind(text, "Job")["spec"]
    assert {name: spec[name] for name in ("completionMode", "completions", "parallelism", "backoffLimit")} == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 0,
    }
    service = of_kind(text, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True, "the nodes meet before any of them is ready"
    assert pod(text, "Job")["subdomain"] == service["metadata"]["name"]
    arguments = [expanded(word, environment(text, index=3)) for word in container(text)["args"]]
    assert arguments == [
        "torchrun",
        "--nnodes=4",
        "--node-rank=3",
        "--rdzv-backend=static",
        "--rdzv-endpoint=train-0.train:29500",
        "--nproc-per-node=8",
        *TRAIN,
    ]
    assert of_kind(text, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_pods_of_the_job_reach_its_nodes() -> None:
    policy = of_kind(k8s(command=TRAIN, nodes=2), "NetworkPolicy")["spec"]
    ours = {"matchLabels": {"batch.kubernetes.io/job-name": "train"}}
    assert policy == {
        "podSelector": ours,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": ours}]}],
    }


def test_several_nodes_with_tensorflow() -> None:
    text = k8s(command=TRAIN, nodes=3, framework="tensorflow")
    for index in range(3):
        told = json.loads(environment(text, index=index)["TF_CONFIG"])
        assert told["cluster"] == {"worker": [f"train-{node}.train:29500" for node in range(3)]}
        assert told["task"] == {"type": "worker", "index": index}
    assert container(text)["args"] == ["python", *TRAIN]
    assert "MultiWorkerMirroredStrategy" in text


def test_several_nodes_with_jax() -> None:
    text = k8s(command=TRAIN, nodes=3, framework="jax", gpus=0)
    assert environment(text, index=2) == {
        "JOB_COMPLETION_INDEX": "2",
        "JAX_COORDINATOR_ADDRESS": "train-0.train:29500",
        "JAX_NUM_PROCESSES": "3",
        "JAX_PROCESS_ID": "2",
    }
    assert container(text)["args"] == ["python", *TRAIN]
    assert "# Your script begins with:\n#   jax.distributed.initialize(" in text


def test_names_of_hosts_are_never_too_long() -> None:
    text = k8s(command=TRAIN, nodes=1000, name="a" * 50)
    assert len(f"{of_kind(text, 'Job')['metadata']['name']}-999") <= 63


def test_an_existing_claim() -> None:
    text = k8s("jupyter", Place(claim="team.data-1"))
    assert "PersistentVolumeClaim" not in [one["kind"] for one in yaml.safe_load_all(text)]
    assert pod(text, "Deployment")["volumes"][0]["persistentVolumeClaim"] == {"claimName": "team.data-1"}
    assert "deletes the PersistentVolumeClaim" not in text
    assert "deletes the PersistentVolumeClaim" in k8s("jupyter")


def test_a_new_claim() -> None:
    spec = of_kind(k8s("jupyter", Place(size=250 * 10**9)), "PersistentVolumeClaim")["spec"]
    assert spec == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "250G"}}}


def test_a_namespace_is_that_of_every_object_and_command() -> None:
    text = k8s("full", Place(namespace="research"))
    assert {one["metadata"]["namespace"] for one in yaml.safe_load_all(text)} == {"research"}
    assert "kubectl " not in text.replace("kubectl -n research ", "")
    assert all("namespace" not in one["metadata"] for one in yaml.safe_load_all(k8s("full")))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (Place(namespace="a\nb: c"), "--namespace"),
        (Place(namespace="Research"), "--namespace"),
        (Place(namespace="a" * 64), "--namespace"),
        (Place(namespace="--x"), "--namespace"),
        (Place(claim="/srv/data"), "--workspace"),
        (Place(claim="a\nb: c"), "--workspace"),
        (Place(claim="a" * 254), "--workspace"),
        (Place(claim="$(x)"), "--workspace"),
    ],
)
def test_places_that_are_refused(place: Place, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        k8s("jupyter", place)


def test_a_plain_image_runs_a_command() -> None:
    with pytest.raises(UsageError, match="has no service to run") as caught:
        k8s()
    assert "-- train.py" in caught.value.hint


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_word_of_the_command_arrives_as_it_is(text: str, nodes: int) -> None:
    written = deploy_k8s.render(subject(), wish(command=("train.py", text), nodes=nodes), Place())
    assert expanded(container(written)["args"][-1], {"JOB_COMPLETION_INDEX": "0", "HOME": "no"}) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (8 * 10**9, "8G"), (1500 * 10**6, "1500M"), (10**12, "1T"), (1024, "1024"), (5000, "5k")],
)
def test_quantities(count: int, text: str) -> None:
    assert deploy_k8s.quantity(count) == text
