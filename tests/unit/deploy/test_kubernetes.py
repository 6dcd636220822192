"""Kubernetes objects: valid by the schemas of the API, without unknown fields, and the effect of each option."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from builder.common.errors import UsageError
from builder.deploy import examples
from tests.fakes.deployed import HOSTILE, expanded, image_of, of_kind, pod, request_of

OLDEST, NEWEST = "1.29", "1.35"
VARIANTS = ["jupyter", "ssh", "full"]
TRAIN = ("train.py", "--epochs", "3")


@pytest.fixture(autouse=True, scope="module")
def _read_schemas_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kubernetes_validate.utils.schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


def validate(documents: list[dict[str, Any]]) -> None:
    """Checks the schemas of the oldest and of a new Kubernetes, and that objects refer to what exists."""
    for document in documents:
        for version in (OLDEST, NEWEST):
            assert kubernetes_validate.validate(document, version, strict=True) == version
        if document["kind"] in ("Job", "Deployment"):
            check_references(document, documents)


def check_references(workload: dict[str, Any], documents: list[dict[str, Any]]) -> None:
    """Checks what no schema can: names of ports, volumes, claims and labels."""
    template = workload["spec"]["template"]
    (container,) = template["spec"]["containers"]
    volumes = template["spec"]["volumes"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [volume["name"] for volume in volumes]
    claims = [document["metadata"]["name"] for document in documents if document["kind"] == "PersistentVolumeClaim"]
    (claim,) = [volume["persistentVolumeClaim"] for volume in volumes if "persistentVolumeClaim" in volume]
    assert [claim["claimName"]] == (claims or [claim["claimName"]])
    # Kubernetes adds this label to the pods of a job.
    labels = template["metadata"]["labels"] | {"batch.kubernetes.io/job-name": workload["metadata"]["name"]}
    for service in (document for document in documents if document["kind"] == "Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        ports = {port["name"] for port in container.get("ports", ())}
        assert {port["targetPort"] for port in service["spec"].get("ports", ())} == ports
    if "selector" in workload["spec"]:
        assert workload["spec"]["selector"]["matchLabels"].items() <= labels.items()


def kinds(text: str) -> list[str]:
    return [document["kind"] for document in yaml.safe_load_all(text)]


def k8s(
    variant: str = "",
    options: Mapping[str, Any] | None = None,
    *,
    framework: str = "pytorch",
    cpu: bool = False,
    **changes: Any,
) -> str:
    image = image_of(variant, framework=framework, cpu=cpu)
    text = examples.kubernetes(image, request_of(**changes), **(options or {}))
    validate(list(yaml.safe_load_all(text)))
    return text


def container(text: str, kind: str = "Job") -> dict[str, Any]:
    (only,) = pod(text, kind)["containers"]
    assert isinstance(only, dict)
    return only


def environment(text: str, kind: str = "Job", index: int = 0) -> dict[str, str]:
    """The variables of a container; the value of a secret is its name and key."""
    values: dict[str, str] = {}
    for variable in container(text, kind).get("env", ()):
        if "value" in variable:
            value = expanded(variable["value"], values)
        elif "secretKeyRef" in variable["valueFrom"]:
            value = "{name}/{key}/{optional}".format(**variable["valueFrom"]["secretKeyRef"])
        else:
            path = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": path}}
            value = str(index)
        values[variable["name"]] = value
    return values


def test_the_schemas_reject_invalid_objects() -> None:
    """Otherwise the other tests would pass with anything."""
    job = of_kind(k8s(command=TRAIN), "Job")
    for change in ({"backoffLimits": 1}, {"backoffLimit": "1"}, {"completionMode": 1}):
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(job | {"spec": job["spec"] | change}, NEWEST, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("gpus", [0, 4])
def test_services(variant: str, gpus: int) -> None:
    text = k8s(variant, gpus=gpus)
    assert kinds(text) == ["PersistentVolumeClaim", "Service", "Deployment"]
    server = container(text, "Deployment")
    assert "args" not in server
    assert "command" not in server, "the entrypoint of the image is tini and the launcher"
    for probe, period, failures in (("startup", 5, 60), ("readiness", 10, 3), ("liveness", 30, 3)):
        assert server[f"{probe}Probe"] == {
            "exec": {"command": ["/usr/local/bin/check-services"]},
            "timeoutSeconds": 10,
            "periodSeconds": period,
            "failureThreshold": failures,
        }
    assert of_kind(text, "Deployment")["spec"]["strategy"] == {"type": "Recreate"}
    assert server.get("resources") == ({"limits": {"nvidia.com/gpu": "4"}} if gpus else None)


def test_the_service_has_the_ports_of_the_image_and_the_pod_has_unprivileged_ports() -> None:
    text = k8s("full")
    ports = [(port["name"], port["port"]) for port in of_kind(text, "Service")["spec"]["ports"]]
    assert ports == [("jupyter", 8888), ("ssh", 22)]
    listening = [(port["name"], port["containerPort"]) for port in container(text, "Deployment")["ports"]]
    assert listening == [("jupyter", 8888), ("ssh", 2222)]
    assert "port-forward service/train 8888:8888 2222:22" in text


def test_logins_are_in_a_secret_that_is_not_in_the_file() -> None:
    text = k8s("full")
    assert "Secret" not in kinds(text)
    assert environment(text, "Deployment") == {
        "GPU_REQUIRED": "1",
        "JUPYTER_TOKEN": "train-login/jupyter-token/True",
        "SSH_PUBLIC_KEY": "train-login/ssh-public-key/True",
        "SSH_PORT": "2222",
    }
    assert "create secret generic train-login --from-literal=jupyter-token=" in text
    # Without a key, an image with SSH only would have no service: the pod waits for the Secret.
    assert environment(k8s("ssh"), "Deployment")["SSH_PUBLIC_KEY"] == "train-login/ssh-public-key/False"


@pytest.mark.parametrize(
    ("variant", "changes"),
    [("full", {}), ("", {"command": TRAIN}), ("full", {"command": TRAIN}), ("", {"command": TRAIN, "nodes": 3})],
)
def test_no_pod_is_root_or_can_become_root(variant: str, changes: dict[str, Any]) -> None:
    text = k8s(variant, **changes)
    kind = "Job" if changes else "Deployment"
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
    paths = [mount["mountPath"] for mount in container(text, kind)["volumeMounts"]]
    assert paths[:4] == ["/workspace", "/dev/shm", "/home/user", "/tmp"]


def test_shared_memory_is_memory_and_has_a_limit() -> None:
    volumes = {volume["name"]: volume for volume in pod(k8s(command=TRAIN, shm=16 * 10**9), "Job")["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16G"}


def test_one_job() -> None:
    text = k8s(command=("train.py", "--epochs", "3"), gpus=2, cpus=8, memory=64 * 10**9)
    spec = of_kind(text, "Job")["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"]) == (2, "Failed")
    assert "completionMode" not in spec
    assert "Service" not in kinds(text)
    trainer = container(text)
    assert trainer["args"] == ["torchrun", "--standalone", "--nproc-per-node=2", "train.py", "--epochs", "3"]
    amounts = {"cpu": "8", "memory": "64G"}
    assert trainer["resources"] == {"limits": amounts | {"nvidia.com/gpu": "2"}, "requests": amounts}
    (toleration,) = pod(text, "Job")["tolerations"]
    assert toleration["key"] == "nvidia.com/gpu"
    assert "tolerations" not in pod(k8s(command=TRAIN, cpu=True, gpus=0), "Job")


def test_several_nodes_with_torchrun() -> None:
    text = k8s(command=TRAIN, nodes=4, gpus=8)
    assert kinds(text) == ["PersistentVolumeClaim", "Service", "NetworkPolicy", "Job"]
    spec = of_kind(text, "Job")["spec"]
    assert {name: spec[name] for name in ("completionMode", "completions", "parallelism", "backoffLimit")} == {
        "completionMode": "Indexed",
        "completions": 4,
        "parallelism": 4,
        "backoffLimit": 0,
    }
    service = of_kind(text, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True, "the nodes connect before any pod is ready"
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
    pods = {"matchLabels": {"batch.kubernetes.io/job-name": "train"}}
    assert policy == {
        "podSelector": pods,
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": pods}]}],
    }


def test_several_nodes_with_tensorflow() -> None:
    text = k8s(command=TRAIN, nodes=3, framework="tensorflow")
    for index in range(3):
        assert json.loads(environment(text, index=index)["TF_CONFIG"]) == {
            "cluster": {"worker": [f"train-{node}.train:29500" for node in range(3)]},
            "task": {"type": "worker", "index": index},
        }
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
    assert "# Your script must begin with:\n#   jax.distributed.initialize(" in text


def test_host_names_are_at_most_63_characters() -> None:
    text = k8s(command=TRAIN, nodes=1000, name="a" * 50)
    assert len(f"{of_kind(text, 'Job')['metadata']['name']}-999") <= 63


def test_an_existing_claim() -> None:
    text = k8s("jupyter", {"claim": "team.data-1"})
    assert "PersistentVolumeClaim" not in kinds(text)
    assert pod(text, "Deployment")["volumes"][0]["persistentVolumeClaim"] == {"claimName": "team.data-1"}
    assert "also deletes the PersistentVolumeClaim" not in text
    assert "also deletes the PersistentVolumeClaim" in k8s("jupyter")


def test_a_new_claim() -> None:
    spec = of_kind(k8s("jupyter", {"size": 250 * 10**9}), "PersistentVolumeClaim")["spec"]
    assert spec == {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "250G"}}}


def test_every_object_and_command_has_the_namespace() -> None:
    text = k8s("full", {"namespace": "research"})
    assert {document["metadata"]["namespace"] for document in yaml.safe_load_all(text)} == {"research"}
    assert "kubectl " not in text.replace("kubectl -n research ", "")
    assert all("namespace" not in document["metadata"] for document in yaml.safe_load_all(k8s("full")))


@pytest.mark.parametrize(("name", "number"), [("on", "1e3"), ("null", "010"), ("y", "12")])
@pytest.mark.parametrize("changes", [{}, {"command": TRAIN}, {"command": TRAIN, "nodes": 2}])
def test_names_are_text_in_yaml(name: str, number: str, changes: dict[str, Any]) -> None:
    """The schemas reject a number or a boolean."""
    text = k8s("full", {"namespace": number, "claim": number}, name=name, **changes)
    for document in yaml.safe_load_all(text):
        assert document["metadata"]["name"] == document["metadata"]["labels"]["app.kubernetes.io/name"] == name
        assert document["metadata"]["namespace"] == number
    assert pod(text, "Job" if changes else "Deployment")["volumes"][0]["persistentVolumeClaim"]["claimName"] == number


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"namespace": "a\nb: c"}, "--namespace"),
        ({"namespace": "Research"}, "--namespace"),
        ({"namespace": "a" * 64}, "--namespace"),
        ({"namespace": "--x"}, "--namespace"),
        ({"claim": "/srv/data"}, "--workspace"),
        ({"claim": "a\nb: c"}, "--workspace"),
        ({"claim": "a" * 254}, "--workspace"),
        ({"claim": "$(x)"}, "--workspace"),
    ],
)
def test_invalid_options(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        k8s("jupyter", options)


def test_a_plain_image_needs_a_command() -> None:
    with pytest.raises(UsageError, match="has no service to run") as caught:
        k8s()
    assert "-- train.py" in caught.value.hint


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_word_of_the_command_is_unchanged(text: str, nodes: int) -> None:
    example = examples.kubernetes(image_of(), request_of(command=("train.py", text), nodes=nodes))
    assert expanded(container(example)["args"][-1], {"JOB_COMPLETION_INDEX": "0", "HOME": "no"}) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (8 * 10**9, "8G"), (1500 * 10**6, "1500M"), (10**12, "1T"), (1024, "1024"), (5000, "5k")],
)
def test_quantities(count: int, text: str) -> None:
    assert examples.quantity(count) == text
