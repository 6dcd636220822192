"""Objects of Kubernetes for an image: services, one job, or a job on several nodes. Pure.

For Kubernetes 1.29 and newer. A Job cannot start all of its pods anew when one fails, so a job on several nodes fails
as a whole, at once, instead of holding GPUs until a timeout.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from builder import deploy
from builder.deploy import JAX, JUPYTER, MASTER_PORT, PYTORCH, SSH, TENSORFLOW, Subject, Wish
from builder.errors import UsageError
from builder.settings import Health

# Source: Kubernetes, "Well-Known Labels, Annotations and Taints".
JOB_LABEL = "batch.kubernetes.io/job-name"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
NAME_LABEL = "app.kubernetes.io/name"
GPU = "nvidia.com/gpu"
_LABEL = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", re.ASCII)
_CLAIM = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where: a namespace, empty for the one of kubectl's context, and an existing claim, or the size of a new one."""

    namespace: str = ""
    claim: str = ""
    size: int = 50 * 10**9


def render(subject: Subject, wish: Wish, place: Place) -> str:
    """Raises UsageError."""
    deploy.check(subject, wish)
    if place.namespace and not _LABEL.fullmatch(place.namespace):
        raise UsageError(f"--namespace: {place.namespace[:80]!r} is no name of a namespace")
    if place.claim and (len(place.claim) > 253 or not _CLAIM.fullmatch(place.claim)):
        raise UsageError(
            f"--workspace: {place.claim[:80]!r} is no name of a PersistentVolumeClaim",
            hint="Name a claim of the namespace, or leave it out for a new one; a folder of a node cannot be named.",
        )
    if not wish.command and not subject.services:
        raise UsageError(f"{subject.reference} has no service to run", hint="Add a command: -- train.py --epochs 3")
    documents = [*([] if place.claim else [_claim(wish, place)]), *_objects(subject, wish, place)]
    for one in documents:
        if place.namespace:
            one["metadata"]["namespace"] = place.namespace
    return deploy.dump(documents, _comment(subject, wish, place))


def quantity(count: int) -> str:
    """Bytes as Kubernetes writes them: 8G."""
    for unit, power in (("T", 12), ("G", 9), ("M", 6), ("k", 3)):
        if count and count % 10**power == 0:
            return f"{count // 10**power}{unit}"
    return str(count)


def _objects(subject: Subject, wish: Wish, place: Place) -> list[dict[str, Any]]:
    if not wish.command:
        ports = [{"name": name, "port": port, "targetPort": name} for name, port in _outside(subject).items()]
        selector = {NAME_LABEL: wish.name}
        return [
            _object("v1", "Service", wish, {"selector": selector, "ports": ports}),
            _object("apps/v1", "Deployment", wish, _deployment(subject, wish, place)),
        ]
    job = _object("batch/v1", "Job", wish, _job(subject, wish, place))
    if wish.nodes == 1:
        return [job]
    selector = {JOB_LABEL: wish.name}
    headless = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
    # What the nodes speak with each other has no login.
    ours = {
        "podSelector": {"matchLabels": selector},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": selector}}]}],
    }
    return [
        _object("v1", "Service", wish, headless),
        _object("networking.k8s.io/v1", "NetworkPolicy", wish, ours),
        job,
    ]


def _outside(subject: Subject) -> dict[str, int]:
    """Service -> port of the Service: that of the image, whatever it is in the pod."""
    return dict(subject.services)


def _object(version: str, kind: str, wish: Wish, spec: dict[str, Any], suffix: str = "") -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": wish.name + suffix, "labels": {NAME_LABEL: wish.name}}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _claim(wish: Wish, place: Place) -> dict[str, Any]:
    mode = "ReadWriteOnce" if wish.nodes == 1 else "ReadWriteMany"
    spec = {"accessModes": [mode], "resources": {"requests": {"storage": quantity(place.size)}}}
    return _object("v1", "PersistentVolumeClaim", wish, spec, "-workspace")


def _deployment(subject: Subject, wish: Wish, place: Place) -> dict[str, Any]:
    container = _container(subject, wish)
    container["ports"] = [{"name": name, "containerPort": port} for name, port in subject.ports.items()]
    health = Health(command=deploy.CHECK)
    probe = {"exec": {"command": list(health.command)}, "timeoutSeconds": health.timeout}
    often = probe | {"periodSeconds": health.interval, "failureThreshold": health.retries}
    # A first pull of a volume's files may be slow: nothing is killed before it has started once.
    container["startupProbe"] = probe | {"periodSeconds": 5, "failureThreshold": 60}
    container["readinessProbe"] = often
    container["livenessProbe"] = often | {"periodSeconds": 3 * health.interval}
    pod = _pod(subject, wish, place, container)
    return {
        "replicas": 1,
        # The old pod has to give back GPUs and volume before a new one can have them.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": {NAME_LABEL: wish.name}},
        "template": {"metadata": {"labels": {NAME_LABEL: wish.name}}, "spec": pod},
    }


def _job(subject: Subject, wish: Wish, place: Place) -> dict[str, Any]:
    pod = {"restartPolicy": "Never"} | _pod(subject, wish, place, _container(subject, wish))
    template = {"metadata": {"labels": {NAME_LABEL: wish.name}}, "spec": pod}
    if wish.nodes == 1:
        # The failed pod has to give back GPUs and volume before a new one can have them.
        return {"backoffLimit": 2, "podReplacementPolicy": "Failed", "template": template}
    template["spec"] = {"subdomain": wish.name} | pod
    return {
        "completionMode": "Indexed",
        "completions": wish.nodes,
        "parallelism": wish.nodes,
        "backoffLimit": 0,
        "template": template,
    }


def _arguments(subject: Subject, wish: Wish) -> list[str]:
    """They follow the image's entrypoint."""
    words = [_literal(word) for word in deploy.training(subject, wish)]
    if wish.nodes == 1 or subject.framework != PYTORCH:
        return words
    nodes = [
        f"--nnodes={wish.nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={_address(wish, 0)}",
    ]
    return [words[0], *nodes, *words[1:]]


def _address(wish: Wish, index: int) -> str:
    """The name of a pod of an Indexed Job, by its headless service."""
    return f"{wish.name}-{index}.{wish.name}:{MASTER_PORT}"


def _variables(subject: Subject, wish: Wish) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"name": "GPU_REQUIRED", "value": "1"}] if wish.gpus else []
    if not wish.command:
        optional = len(subject.services) > 1
        if JUPYTER in subject.services:
            found.append(_secret(wish, "JUPYTER_TOKEN", "jupyter-token", optional=True))
        if SSH in subject.services:
            found.append(_secret(wish, "SSH_PUBLIC_KEY", "ssh-public-key", optional=optional))
            found.append({"name": "SSH_PORT", "value": str(deploy.SSH_PORT)})
    if wish.nodes == 1:
        return found
    # Kubernetes sets it too, but last, where no other variable can refer to it.
    found.append({"name": "JOB_COMPLETION_INDEX", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}})
    if subject.framework == TENSORFLOW:
        workers = {"worker": [_address(wish, index) for index in range(wish.nodes)]}
        task = '{"type": "worker", "index": $(JOB_COMPLETION_INDEX)}'
        found.append({"name": "TF_CONFIG", "value": f'{{"cluster": {json.dumps(workers)}, "task": {task}}}'})
    if subject.framework == JAX:
        found += [
            {"name": "JAX_COORDINATOR_ADDRESS", "value": _address(wish, 0)},
            {"name": "JAX_NUM_PROCESSES", "value": str(wish.nodes)},
            {"name": "JAX_PROCESS_ID", "value": "$(JOB_COMPLETION_INDEX)"},
        ]
    return found


def _secret(wish: Wish, variable: str, key: str, *, optional: bool) -> dict[str, Any]:
    reference = {"name": f"{wish.name}-login", "key": key, "optional": optional}
    return {"name": variable, "valueFrom": {"secretKeyRef": reference}}


def _container(subject: Subject, wish: Wish) -> dict[str, Any]:
    found: dict[str, Any] = {"name": wish.name, "image": str(subject.reference)}
    if wish.command:
        found["args"] = _arguments(subject, wish)
    if variables := _variables(subject, wish):
        found["env"] = variables
    if resources := _resources(wish):
        found["resources"] = resources
    found["securityContext"] = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    found["volumeMounts"] = [{"name": name, "mountPath": path} for name, (path, _) in _mounts(subject, wish).items()]
    return found


def _mounts(subject: Subject, wish: Wish, claim: str = "") -> dict[str, tuple[str, dict[str, Any]]]:
    """Volume -> where it is mounted, and what it is."""
    found: dict[str, tuple[str, dict[str, Any]]] = {
        "workspace": (deploy.WORKSPACE, {"persistentVolumeClaim": {"claimName": claim}}),
        "shm": (deploy.SHM, {"emptyDir": {"medium": "Memory", "sizeLimit": quantity(wish.shm)}}),
        "home": (deploy.HOME, {"emptyDir": {}}),
        "tmp": (deploy.TMP, {"emptyDir": {}}),
    }
    if SSH in subject.services and not wish.command:
        found["host-keys"] = (deploy.HOST_KEYS, {"emptyDir": {}})
    return found


def _pod(subject: Subject, wish: Wish, place: Place, container: dict[str, Any]) -> dict[str, Any]:
    claim = place.claim or f"{wish.name}-workspace"
    mounts = _mounts(subject, wish, claim)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # Else a Service called jupyter would set JUPYTER_PORT=tcp://...
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": deploy.USER,
            "runAsGroup": deploy.GROUP,
            # The volume becomes writable for the group that every user of the image has.
            "fsGroup": deploy.GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": [{"name": name} | kind for name, (_, kind) in mounts.items()],
    }
    if wish.gpus:
        pod["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    return pod


def _resources(wish: Wish) -> dict[str, Any]:
    amounts: dict[str, Any] = {}
    if wish.cpus:
        amounts["cpu"] = str(wish.cpus)
    if wish.memory:
        amounts["memory"] = quantity(wish.memory)
    limits = amounts | ({GPU: str(wish.gpus)} if wish.gpus else {})
    return {} if not limits else {"limits": limits} | ({"requests": amounts} if amounts else {})


def _literal(text: str) -> str:
    """Kubernetes replaces $(NAME) in arguments; two dollars are one."""
    return text.replace("$", "$$")


def _comment(subject: Subject, wish: Wish, place: Place) -> list[str]:
    kubectl = f"kubectl -n {place.namespace}" if place.namespace else "kubectl"
    lines = [
        f"{subject.reference}, written by `builder deploy k8s`: an example to edit. Kubernetes 1.29 or newer.",
        "",
        f"Start:   {kubectl} apply -f FILE",
    ]
    if wish.command:
        several = f"-l {JOB_LABEL}={wish.name} --prefix --max-log-requests {wish.nodes}"
        lines.append(f"Follow:  {kubectl} logs -f {several if wish.nodes > 1 else f'job/{wish.name}'}")
        lines.append(f"Again:   {kubectl} delete job {wish.name}, then start")
    else:
        login = ['--from-literal=jupyter-token="$(openssl rand -hex 24)"'] if JUPYTER in subject.services else []
        login += ['--from-file=ssh-public-key="$HOME/.ssh/id_ed25519.pub"'] if SSH in subject.services else []
        if login:
            lines.append("Login, made by you before the start and in no file:")
            lines.append(f"         {kubectl} create secret generic {wish.name}-login {' '.join(login)}")
        if JUPYTER in subject.services:
            lines.append("         Without it, the log has a random token that is new with each pod.")
        pairs = " ".join(f"{subject.ports[name]}:{port}" for name, port in _outside(subject).items())
        lines.append(f"Reach:   {kubectl} port-forward service/{wish.name} {pairs}")
        lines.append(f"Log:     {kubectl} logs deployment/{wish.name}")
    if not place.claim:
        lines.append("`delete -f FILE` deletes the PersistentVolumeClaim too, and your work with it.")
    lines.append("What is in /dev/shm counts as memory of the container.")
    if wish.nodes > 1:
        lines.append("If a node fails, the whole job fails: start it again from your last checkpoint.")
    if wish.nodes > 1 and not place.claim:
        lines.append("The volume is mounted on every node: its storage class has to offer ReadWriteMany.")
    if wish.nodes > 1 and subject.framework == JAX:
        lines += ["Your script begins with:", f"  {deploy.JAX_CALL}"]
    if wish.nodes > 1 and subject.framework == TENSORFLOW:
        lines.append("Your script uses tf.distribute.MultiWorkerMirroredStrategy, which reads TF_CONFIG.")
    return lines
