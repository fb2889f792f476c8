"""Manifests for Kubernetes: valid by the published schemas (`schemas/README.md`), and what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from tests.launch.recipes import job, recipe
from tunix.errors import UserError
from tunix.launch import kubernetes
from tunix.launch.job import Job
from tunix.recipe.recipe import Recipe

SCHEMAS = Path(__file__).parent / "schemas"
TARGETS = ("gke-tpu", "gke-gpu", "pathways")
FULL = {
    "namespace": "team",
    "service_account": "trainer",
    "secrets": (("HF_TOKEN", "hf/token"), ("WANDB_API_KEY", "wandb")),
    "mounts": (("runs", "/runs"), ("rows", "/data")),
}
"""Every option that adds something to a manifest."""


def validator(kind: str) -> Draft7Validator:
    loaded = {path.name: json.loads(path.read_text()) for path in SCHEMAS.glob("*.json")}
    known = Registry().with_resources((name, Resource.from_contents(schema)) for name, schema in loaded.items())
    references = {"ConfigMap": "kubernetes.json#/$defs/io.k8s.api.core.v1.ConfigMap"}
    return Draft7Validator({"$ref": references.get(kind, f"{kind.lower()}.json")}, registry=known)


def documents(of: Job) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(kubernetes.manifest(of)))


def job_spec(of: Job) -> dict[str, Any]:
    (replicated,) = documents(of)[1]["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def pod(of: Job) -> dict[str, Any]:
    return job_spec(of)["template"]["spec"]


def variables(of: Job) -> dict[str, Any]:
    found = pod(of)["containers"][0]["env"]
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in found}


@pytest.mark.parametrize("options", [{}, FULL], ids=["few options", "all options"])
@pytest.mark.parametrize("target", TARGETS)
def test_manifests_are_valid_by_the_published_schemas(target: str, options: dict[str, Any]):
    config, workload = documents(job(target, **options))
    for document in (config, workload):
        errors = [f"{error.json_path}: {error.message}" for error in validator(document["kind"]).iter_errors(document)]
        assert errors == []
    assert {config["metadata"].get("namespace"), workload["metadata"].get("namespace")} == {options.get("namespace")}


@pytest.mark.parametrize(
    ("target", "change"),
    [
        ("gke-tpu", lambda spec: spec.update(maxRestarts=3)),
        ("gke-gpu", lambda spec: spec["failurePolicy"]["rules"][0].update(action="Restart")),
        ("gke-tpu", lambda spec: spec["replicatedJobs"][0]["template"]["spec"].update(backofLimit=0)),
        ("pathways", lambda spec: spec["workers"][0].update(type="ct5lp-hightpu-1t")),
        ("pathways", lambda spec: spec["controller"]["template"]["spec"]["containers"][0].update(command="tunix")),
    ],
)
def test_the_schemas_refuse_what_is_wrong(target: str, change: Any):
    workload = documents(job(target))[1]
    change(workload["spec"])
    assert list(validator(workload["kind"]).iter_errors(workload))


@pytest.mark.parametrize("target", TARGETS)
def test_the_recipe_goes_along_as_it_is(target: str, tmp_path: Path):
    given = recipe(
        data={"train": "org/rows", "chat": True, "system": "Be brief.\n  Two: lines # and 'signs'\n"}, steps=7
    )
    text = documents(job(target, given))[0]["data"]["recipe.yaml"]
    (tmp_path / "r.yaml").write_text(text)
    assert Recipe.load(tmp_path / "r.yaml") == given


def test_tpus_are_selected_by_their_slice_and_found_by_jax():
    # v5e 4x4: 16 chips, 4 in a host.
    of = job("gke-tpu")
    labels = {"gke-tpu-accelerator": "tpu-v5-lite-podslice", "gke-tpu-topology": "4x4"}
    assert pod(of)["nodeSelector"] == {f"cloud.google.com/{name}": value for name, value in labels.items()}
    assert job_spec(of)["completions"] == job_spec(of)["parallelism"] == 4
    assert pod(of)["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}
    # JAX reads what GKE sets (TPU_WORKER_HOSTNAMES, MEGASCALE_*): nothing may stand in its way.
    assert not [name for name in variables(of) if name.startswith(("JAX_COORD", "JAX_NUM", "JAX_PROC", "TPU_", "MEGA"))]


def test_slices_are_jobs_of_one_set():
    workload = documents(job("gke-tpu", slices=2))[1]
    assert workload["spec"]["replicatedJobs"][0]["replicas"] == 2
    assert workload["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert documents(job("pathways", slices=2))[1]["spec"]["workers"][0]["numSlices"] == 2


def test_gpu_pods_meet_at_the_first():
    # 16 GPUs, 8 in a host; a pod's name is JOBSET-JOB-INDEX-POD, its domain the JobSet's name.
    found = variables(job("gke-gpu"))
    assert found["JAX_COORDINATOR_ADDRESS"] == "small-1-host-0-0.small-1:8476"
    assert found["JAX_NUM_PROCESSES"] == "2"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert found["JAX_PROCESS_ID"] == {"fieldRef": {"fieldPath": index}}
    spec = pod(job("gke-gpu"))
    assert spec["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert spec["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in spec["volumes"]


@pytest.mark.parametrize(("target", "topology"), [("gke-tpu", "v5e:2x2"), ("gke-gpu", "h100:8")])
def test_a_host_alone_looks_for_no_other(target: str, topology: str):
    of = job(target, topology=topology)
    assert variables(of)["JAX_NUM_PROCESSES"] == "1"
    assert job_spec(of)["completions"] == 1
    assert "annotations" not in documents(of)[1]["metadata"]


@pytest.mark.parametrize("target", ["gke-tpu", "gke-gpu"])
def test_a_job_restarts_but_for_a_user_error(target: str):
    of = job(target, restarts=7, grace=90)
    policy = documents(of)[1]["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 7
    # Old pods are gone before new ones of the same names come.
    assert policy["restartStrategy"] == "BlockingRecreate"
    # Exit code 2 fails the Job by its policy, and that fails the set; 75, 130 and signals leave the default, a restart.
    (rule,) = job_spec(of)["podFailurePolicy"]["rules"]
    exits = {"containerName": "tunix", "operator": "In", "values": [2]}
    assert rule == {"action": "FailJob", "onExitCodes": exits}
    assert policy["rules"] == [
        {"name": "userError", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    ]
    assert job_spec(of)["backoffLimit"] == 0
    # A podFailurePolicy wants pods that the kubelet does not restart; SIGTERM reaches tunix, which is no shell's child.
    assert pod(of)["restartPolicy"] == "Never"
    assert pod(of)["terminationGracePeriodSeconds"] == 90
    assert pod(of)["containers"][0]["command"][:2] == ["tunix", "run"]


def test_pathways_has_one_process_and_its_own_restarts():
    workload = documents(job("pathways", restarts=7, grace=90))[1]["spec"]
    assert workload["maxRestarts"] == 7
    assert workload["workers"] == [{"type": "ct5lp-hightpu-4t", "topology": "4x4", "numSlices": 1}]
    assert workload["controller"]["mainContainerName"] == "tunix"
    spec = workload["controller"]["template"]["spec"]
    assert spec["terminationGracePeriodSeconds"] == 90
    # Pathways' controller adds JAX_PLATFORMS=proxy to the container by its name.
    assert [one["name"] for one in spec["containers"]] == ["tunix"]
    with pytest.raises(UserError, match=r"--topology v5e:1x1: Pathways has hosts of 4 x v5e, .*, and not of 1"):
        kubernetes.manifest(job("pathways", topology="v5e:1x1"))


def test_secrets_are_named_and_not_written():
    found = variables(job("gke-gpu", **FULL))
    assert found["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "token"}}
    assert found["WANDB_API_KEY"] == {"secretKeyRef": {"name": "wandb", "key": "WANDB_API_KEY"}}


def test_only_volumes_and_one_scratch_folder_are_written():
    of = job("gke-gpu", **FULL)
    main = pod(of)["containers"][0]
    assert main["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
    writable = [one["mountPath"] for one in main["volumeMounts"] if not one.get("readOnly")]
    assert writable == ["/tmp", "/runs", "/data", "/dev/shm"]
    found = variables(of)
    assert found["HOME"] == "/tmp"
    # Caches outlive the pod where there is a volume, so that a restart neither downloads nor compiles again.
    assert found["HF_HOME"] == "/runs/.cache/huggingface"
    assert found["JAX_COMPILATION_CACHE_DIR"] == "/runs/.cache/jax"


def test_code_goes_along_under_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards").mkdir()
    code = 'def short(completion: str) -> float:\n    return 1.0  # "signs": {and} \\ more\n'
    (tmp_path / "rewards/judge.py").write_text(code)
    given = recipe(
        algorithm={"name": "grpo", "group_size": 4},
        reward={"functions": ["number", "rewards/judge.py:short"]},
        data={"train": "org/rows", "completion_length": 8, "max_length": 32},
    )
    of = job("gke-gpu", given)
    data = documents(of)[0]["data"]
    assert data["0-judge.py"] == code
    (files,) = (volume for volume in pod(of)["volumes"] if volume["name"] == "files")
    assert {"key": "0-judge.py", "path": "rewards/judge.py"} in files["configMap"]["items"]
    # Relative paths of the recipe start in the folder of these files.
    mounted = {one["name"]: one["mountPath"] for one in pod(of)["containers"][0]["volumeMounts"]}
    assert mounted["files"] == pod(of)["containers"][0]["workingDir"]
    assert pod(of)["containers"][0]["command"][2] == "/etc/tunix/.tunix-recipe.yaml"
