"""examples/: what they say about images, and what the schemas that `make lint` uses cannot check.

tests/integration/test_examples.py starts the Compose file; tests/local/test_slurm.py runs the Slurm scripts with
stand-ins; tests/integration/test_readme.py looks for their images in matrix.yaml.
"""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from builder.release.additions import read_team_file
from tests.paths import ROOT

EXAMPLES = ROOT / "examples"
FILES = sorted(path for path in EXAMPLES.iterdir() if path.name != "README.md")
KUBERNETES = [path for path in FILES if path.name.startswith("kubernetes-")]
CONTAINERS = [EXAMPLES / "compose.yaml", *KUBERNETES]
WRITABLE = {"/workspace", "/home/user", "/tmp", "/dev/shm"}  # what programs in an image write to


def documents(path: Path, text: str | None = None) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8") if text is None else text))


def of_kind(path: Path, kind: str) -> dict[str, Any]:
    """The only object of a kind."""
    (document,) = [document for document in documents(path) if document["kind"] == kind]
    return document


def pod(path: Path) -> dict[str, Any]:
    (workload,) = [document for document in documents(path) if "template" in document.get("spec", {})]
    spec = workload["spec"]["template"]["spec"]
    assert isinstance(spec, dict)
    return spec


def container(path: Path) -> dict[str, Any]:
    """The only container of a Compose file, or of Kubernetes objects."""
    (only,) = pod(path)["containers"] if path in KUBERNETES else documents(path)[0]["services"].values()
    assert isinstance(only, dict)
    return only


def with_alternatives(path: Path) -> str:
    """The file with the lines of YAML that are in indented comments: `# - name: X`, and the lines that continue it."""
    lines = []
    inside = False
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        is_start = bool(re.match(r" +# (?:- |\w+:$)", line))
        inside = is_start or (inside and bool(re.match(r" +#  ", line)))
        lines.append(re.sub(r"^( +)# ", r"\1", line) if inside else line)
    return "".join(lines)


# ---- all files


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_program_of_the_images_exists(path: Path) -> None:
    programs = set(re.findall(r"/(?:opt/examples|usr/local/bin)/[\w/.-]+\w", path.read_text(encoding="utf-8")))
    assert [program for program in programs if not list(ROOT.glob(f"templates/*/files{program}"))] == []


def test_the_readme_lists_the_files() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^\| \[([\w.-]+)\]\(\1\) \|", text, re.MULTILINE)) == [path.name for path in FILES]


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_every_variable_is_one_that_something_reads(path: Path) -> None:
    """The images refuse no variable that they do not know."""
    files = ROOT.glob("templates/*/files/etc/variables.d/*.json")
    known = {entry["name"] for file in files for entry in json.loads(file.read_text(encoding="utf-8"))}
    environment = re.findall(r"^ +(?:# )?- name: ([A-Z_]+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    if path not in KUBERNETES:
        environment = list(container(path)["environment"])
    assert "GPU_REQUIRED" in environment
    assert set(environment) <= known | {"JOB_COMPLETION_INDEX", "NCCL_SOCKET_IFNAME", "TF_CONFIG"}


# ---- Compose


def test_the_compose_file_with_its_alternatives_is_valid() -> None:
    file = resources.files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    (data,) = documents(EXAMPLES / "compose.yaml", with_alternatives(EXAMPLES / "compose.yaml"))
    jsonschema.validate(data, schema)
    service = data["services"]["workstation"]
    assert "bind" in [mount["type"] for mount in service["volumes"]]


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("compose*.yaml")), ids=lambda path: path.name)
def test_services_are_open_on_this_machine_only_and_without_capabilities(path: Path) -> None:
    [data] = documents(path)
    for service in data["services"].values():
        assert [port for port in service.get("ports", ()) if not port.startswith("127.0.0.1:")] == []
        assert (service["cap_drop"], service["security_opt"]) == (["ALL"], ["no-new-privileges:true"])
        assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "devices"} & service.keys()
        assert service["image"].startswith("registry.example.com/") or service["user"] == "1000:0", "it would be root"


def test_the_workstation_is_not_root_and_no_login_is_in_the_file() -> None:
    service = container(EXAMPLES / "compose.yaml")
    assert (service["user"], service["read_only"]) == ("1000:0", True)
    assert (service["environment"]["JUPYTER_TOKEN"], service["environment"]["SSH_PUBLIC_KEY"]) == (None, None)


# ---- Kubernetes


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_kubernetes_objects_with_their_alternatives_are_valid(path: Path) -> None:
    for document in documents(path, with_alternatives(path)):
        kubernetes_validate.validate(document, "1.35", strict=True)


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_names_that_objects_refer_to_exist(path: Path) -> None:
    objects = documents(path)
    (workload,) = [document for document in objects if "template" in document.get("spec", {})]
    template = workload["spec"]["template"]
    volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container(path)["volumeMounts"]} == volumes.keys()
    claim = of_kind(path, "PersistentVolumeClaim")["metadata"]["name"]
    claims = [volume["persistentVolumeClaim"] for volume in volumes.values() if "persistentVolumeClaim" in volume]
    assert [each["claimName"] for each in claims] == [claim]
    # Kubernetes adds this label to the pods of a job.
    labels = {"batch.kubernetes.io/job-name": workload["metadata"]["name"]} if workload["kind"] == "Job" else {}
    labels |= template.get("metadata", {}).get("labels", {})
    selectors = [document["spec"]["selector"] for document in objects if "selector" in document["spec"]]
    selectors += [document["spec"]["podSelector"] for document in objects if "podSelector" in document["spec"]]
    for selector in selectors:
        assert selector.get("matchLabels", selector).items() <= labels.items()
    ports = {port["name"] for port in container(path).get("ports", ())}
    services = [document["spec"] for document in objects if document["kind"] == "Service"]
    assert {port["targetPort"] for service in services for port in service.get("ports", ())} == ports


@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.name)
def test_shared_memory_is_part_of_the_memory_of_a_pod(path: Path) -> None:
    [shm] = [volume["emptyDir"] for volume in pod(path)["volumes"] if volume["name"] == "shm"]
    amounts = container(path)["resources"]
    assert shm["medium"] == "Memory"
    assert int(shm["sizeLimit"].removesuffix("Gi")) < int(amounts["limits"]["memory"].removesuffix("Gi"))
    assert amounts["limits"] == amounts["requests"] | {"nvidia.com/gpu": amounts["limits"]["nvidia.com/gpu"]}


def test_the_nodes_of_a_job_have_names_and_ranks() -> None:
    path = EXAMPLES / "kubernetes-multi-node.yaml"
    job, service = of_kind(path, "Job"), of_kind(path, "Service")
    nodes = job["spec"]["completions"]
    assert (job["spec"]["completionMode"], job["spec"]["parallelism"], job["spec"]["backoffLimit"]) == (
        "Indexed", nodes, 0,
    )  # fmt: skip
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert pod(path)["subdomain"] == service["metadata"]["name"]
    workers = [f"{job['metadata']['name']}-{index}.{service['metadata']['name']}:29500" for index in range(nodes)]
    assert container(path)["args"][:6] == [
        "torchrun",
        f"--nnodes={nodes}",
        "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv-backend=static",
        f"--rdzv-endpoint={workers[0]}",
        "--nproc-per-node=gpu",
    ]
    assert f"--coordinator={workers[0]}, --processes={nodes}, " in path.read_text(encoding="utf-8"), "of JAX"
    objects = documents(path, with_alternatives(path))
    [job] = [document for document in objects if document["kind"] == "Job"]
    env = {variable["name"]: variable for variable in job["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert list(env).index("JOB_COMPLETION_INDEX") < list(env).index("TF_CONFIG"), "it would not be expanded"
    assert json.loads(env["TF_CONFIG"]["value"].replace("$(JOB_COMPLETION_INDEX)", "1")) == {
        "cluster": {"worker": workers},
        "task": {"type": "worker", "index": 1},
    }


def test_kubeflow_finds_its_container_and_the_login_is_turned_off_for_its_host_only() -> None:
    path = EXAMPLES / "kubeflow-notebook.yaml"
    claim, notebook = documents(path)
    kubernetes_validate.validate(claim, "1.35", strict=True)
    spec = notebook["spec"]["template"]["spec"]
    kubernetes_validate.validate({"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": spec}, "1.35", strict=True)
    assert spec["enableServiceLinks"] is False
    [server] = spec["containers"]
    assert server["name"] == notebook["metadata"]["name"]
    assert {port["containerPort"] for port in server["ports"]} == {8888}
    assert not {"command", "args"} & server.keys()
    assert {variable["name"]: variable["value"] for variable in server["env"]} == {
        "GPU_REQUIRED": "1",
        "JUPYTER_ALLOW_NO_LOGIN": "1",
        "JUPYTER_TOKEN": "",
        "JUPYTER_ALLOWED_HOSTS": "kubeflow.example.com",
    }
    assert "/workspace" in {mount["mountPath"] for mount in server["volumeMounts"]}


def test_no_id_is_fixed_on_openshift() -> None:
    [overlay] = documents(EXAMPLES / "kustomization.yaml")
    [patch] = overlay["patches"]
    path = EXAMPLES / overlay["resources"][0]
    deployment = of_kind(path, patch["target"]["kind"])
    assert deployment["metadata"]["name"] == patch["target"]["name"]
    for change in yaml.safe_load(patch["patch"]):
        assert change["op"] == "remove"
        *parents, last = change["path"].split("/")[1:]
        target = deployment
        for parent in parents:
            target = target[parent]
        del target[last]
    kubernetes_validate.validate(deployment, "1.35", strict=True)
    context = deployment["spec"]["template"]["spec"]["securityContext"]
    assert context.keys() == {"runAsNonRoot", "fsGroupChangePolicy", "seccompProfile"}


def test_each_profile_of_the_hub_has_a_gpu_or_does_not_require_one() -> None:
    [values] = documents(EXAMPLES / "jupyterhub-kubernetes.yaml")
    assert values["singleuser"]["extraEnv"] == {"GPU_REQUIRED": "1"}
    assert values["singleuser"]["extraPodConfig"] == {"enableServiceLinks": False}
    for profile in values["singleuser"]["profileList"]:
        settings = profile["kubespawner_override"]
        has_gpu = "nvidia.com/gpu" in settings.get("extra_resource_limits", {})
        environment = settings.get("environment", {})
        assert has_gpu == (environment.get("GPU_REQUIRED") != "0"), profile["display_name"]
        # The image's `all` would give it every GPU of a node whose default runtime is NVIDIA's. With a GPU, the device
        # plugin sets the variable, and the pod's own would replace that.
        assert environment.get("NVIDIA_VISIBLE_DEVICES") == (None if has_gpu else "void"), profile["display_name"]


# ---- custom resources

METADATA = {"name": "string", "labels": "object", "annotations": "object"}
JOB = {"completions": "integer", "parallelism": "integer", "backoffLimit": "integer", "template": {"spec": "object"}}
JOBS = [{"name": "string", "template": {"metadata": METADATA, "spec": JOB}}]
RAY = {"rayStartParams": "object", "template": {"spec": "object"}}
COUNTS = {"groupName": "string", "replicas": "integer", "minReplicas": "integer", "maxReplicas": "integer"}
# Kind -> apiVersion, and the fields of `spec` that the examples use, with their types. From the definitions of KServe
# 0.20, Kubeflow Trainer 2.3, JobSet 0.12 and KubeRay 1.7. Kubernetes' own schemas check the pods.
CUSTOM_RESOURCES: dict[str, tuple[str, Any]] = {
    "InferenceService": ("serving.kserve.io/v1beta1", {"predictor": "object"}),
    "TrainingRuntime": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "mlPolicy": {"numNodes": "integer", "torch": "object"},
            "template": {"spec": {"failurePolicy": {"maxRestarts": "integer"}, "replicatedJobs": JOBS}},
        },
    ),
    "TrainJob": (
        "trainer.kubeflow.org/v1alpha1",
        {
            "runtimeRef": {"apiGroup": "string", "kind": "string", "name": "string"},
            "trainer": {
                "image": "string", "args": ["string"], "env": ["object"], "numNodes": "integer",
                "resourcesPerNode": {"limits": "object", "requests": "object"},
            },
        },
    ),
    "JobSet": (
        "jobset.x-k8s.io/v1alpha2",
        {
            "failurePolicy": {"maxRestarts": "integer"},
            "network": {"enableDNSHostnames": "boolean", "publishNotReadyAddresses": "boolean"},
            "replicatedJobs": JOBS,
        },
    ),
    "RayJob": (
        "ray.io/v1",
        {
            "entrypoint": "string", "submissionMode": "string", "shutdownAfterJobFinishes": "boolean",
            "rayClusterSpec": {
                "rayVersion": "string", "headGroupSpec": RAY, "workerGroupSpecs": [{**COUNTS, **RAY}],
            },
        },
    ),
}  # fmt: skip
CUSTOM = [
    EXAMPLES / name for name in ("jobset.yaml", "kserve-vllm.yaml", "kubeflow-trainjob.yaml", "kuberay-rayjob.yaml")
]


def strict(fields: Any) -> dict[str, Any]:
    """The JSON schema that allows these fields and no others."""
    if isinstance(fields, dict):
        properties = {name: strict(value) for name, value in fields.items()}
        return {"type": "object", "additionalProperties": False, "properties": properties}
    return {"type": "array", "items": strict(fields[0])} if isinstance(fields, list) else {"type": fields}


def pods(value: Any) -> list[dict[str, Any]]:
    """The specifications of pods in an object: whatever has containers."""
    if isinstance(value, dict) and "containers" in value:
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [pod for each in values for pod in pods(each)]


@pytest.mark.parametrize("path", CUSTOM, ids=lambda path: path.name)
def test_custom_resources_are_valid(path: Path) -> None:
    for document in documents(path):
        version, fields = CUSTOM_RESOURCES[document["kind"]]
        top = {"apiVersion": "string", "kind": "string", "metadata": METADATA, "spec": fields}
        jsonschema.validate(document, strict(top))
        assert document["apiVersion"] == version
        specs = pods(document)
        if document["kind"] == "TrainJob":  # Kubeflow puts these fields into the container `node` of the runtime
            trainer = document["spec"]["trainer"]
            node = {name: trainer[name] for name in ("image", "args", "env")}
            specs = [{"containers": [{**node, "name": "node", "resources": trainer["resourcesPerNode"]}]}]
        for spec in specs:
            core = {
                name: value for name, value in spec.items() if name not in ("minReplicas", "maxReplicas")
            }  # KServe's
            pod_object = {"apiVersion": "v1", "kind": "Pod", "metadata": {}, "spec": core}
            kubernetes_validate.validate(pod_object, "1.35", strict=True)


@pytest.mark.parametrize("path", [*KUBERNETES, *CUSTOM, EXAMPLES / "dra-job.yaml"], ids=lambda path: path.name)
def test_no_pod_is_root_and_pods_write_only_to_their_volumes(path: Path) -> None:
    specs = [spec for document in documents(path) for spec in pods(document)]
    assert specs
    for spec in specs:
        context = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 0, "fsGroup": 0}
        assert spec["securityContext"].items() >= context.items()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        [only] = spec["containers"]
        secured: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        if path in KUBERNETES:
            secured["readOnlyRootFilesystem"] = True
            assert {mount["mountPath"] for mount in only["volumeMounts"]} == WRITABLE
        assert only["securityContext"] == secured
        assert "command" not in only, "the launcher would not run"
        assert {mount["name"] for mount in only["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize(
    ("name", "variable"),
    [
        ("kubernetes-jupyter.yaml", "JUPYTER_TOKEN"),
        ("kubernetes-vllm.yaml", "VLLM_API_KEY"),
        ("kserve-vllm.yaml", "VLLM_API_KEY"),
    ],
)
def test_a_key_is_in_a_secret_that_is_not_in_the_file(name: str, variable: str) -> None:
    """Without that of vLLM, the pod does not start: a random key would be in the log."""
    [spec] = [pod for document in documents(EXAMPLES / name) for pod in pods(document)]
    [key] = [entry for entry in spec["containers"][0]["env"] if entry["name"] == variable]
    secret = key["valueFrom"]["secretKeyRef"]
    assert secret.get("optional", False) is (variable == "JUPYTER_TOKEN")
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert f"create secret generic {secret['name']} --from-literal={secret['key']}=" in text
    if variable == "VLLM_API_KEY":
        assert spec["containers"][0]["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_nodes_of_a_jobset_find_the_first_one() -> None:
    [jobset] = documents(EXAMPLES / "jobset.yaml")
    [job] = jobset["spec"]["replicatedJobs"]
    nodes = job["template"]["spec"]["completions"]
    assert job["template"]["spec"]["parallelism"] == nodes
    [spec] = pods(jobset)
    name = jobset["metadata"]["name"]
    options = [f"--nnodes={nodes}", f"--rdzv-endpoint={name}-{job['name']}-0-0.{name}:29500"]
    assert set(options) <= set(spec["containers"][0]["args"])


def test_the_device_is_that_of_the_claim() -> None:
    path = EXAMPLES / "dra-job.yaml"
    for document in documents(path):
        kubernetes_validate.validate(document, "1.35", strict=True)
    [spec] = pods(of_kind(path, "Job"))
    [claim] = spec["resourceClaims"]
    assert claim["resourceClaimTemplateName"] == of_kind(path, "ResourceClaimTemplate")["metadata"]["name"]
    assert spec["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]


# ---- builder add


def test_the_packages_of_the_image_for_language_models_were_installed_in_its_parent() -> None:
    [addition] = read_team_file(EXAMPLES / "llm.yaml")
    [tested] = documents(ROOT / "tools/packages.yaml")
    cell = "pt-2.9-cu128-py313-jupyter"
    assert addition.parent.tag == "2.9-jupyter"
    assert {each.text for each in addition.request.requirements} <= {
        name for name, package in tested["packages"].items() if cell in package["cells"]
    }


# ---- Slurm


@pytest.mark.parametrize("name", ["slurm.sh", "slurm-jupyter.sh"])
def test_sbatch_reads_every_option(name: str) -> None:
    """It ignores those after the first command."""
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    first_command = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    options = [number for number, line in enumerate(lines) if line.startswith("#SBATCH --")]
    assert options
    assert max(options) < first_command
