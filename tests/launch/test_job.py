"""How many hosts a recipe takes, what outlives a pod, and what has to be given: one clear message each."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch.recipes import EXTRAS, job, recipe
from tunix.errors import UserError
from tunix.launch.job import Options, placement
from tunix.launch.submit import job_of, mount_of
from tunix.recipe.recipe import Recipe

TEACHER = {"family": "llama", "mesh": {"fsdp": 4}}


def distilled(**sections: Any) -> Recipe:
    return recipe(algorithm={"name": "distill"}, teacher=TEACHER, **sections)


@pytest.mark.parametrize(
    ("mesh", "platform", "topology", "slices", "per_host", "shape", "hosts", "each"),
    [
        ("auto", "gpu", "h100:16", 1, None, "16", 2, 8),
        ("auto", "gpu", "h100:1", 1, None, "1", 1, 1),
        ("auto", "gpu", "h200:16", 1, 4, "16", 4, 4),
        ({"data": 2, "fsdp": 16}, "gpu", "h100", 1, None, "32", 4, 8),
        ({"data": 2}, "gpu", "h100:16", 1, None, "16", 2, 8),
        ("auto", "tpu", "v5e:4x4", 1, None, "4x4", 4, 4),
        ("auto", "tpu", "v5e:2x4", 1, 8, "2x4", 1, 8),
        ("auto", "tpu", "v6e:1x1", 1, None, "1x1", 1, 1),
        ({"fsdp": 64}, "tpu", "v5p", 1, None, "4x4x4", 16, 4),
        ({"data": 2, "fsdp": 16}, "tpu", "v5e", 2, None, "4x4", 4, 4),
    ],
)
def test_hosts_follow_from_mesh_and_topology(
    mesh: Any, platform: str, topology: str, slices: int, per_host: int | None, shape: str, hosts: int, each: int
):
    found = placement(recipe(mesh=mesh), platform, topology, slices, per_host)
    assert (found.shape, found.hosts, found.per_host, found.slices) == (shape, hosts, each, slices)
    assert found.devices == slices * hosts * each
    assert found.processes == slices * hosts


def test_the_teacher_s_devices_count_too():
    # 4 of the teacher's beside 4 of the student's.
    assert placement(distilled(mesh={"fsdp": 4}), "gpu", "h100", 1, None).devices == 8
    with pytest.raises(UserError, match=r"mesh is for 8 devices beside the 4 that only teach or sample, .* has 8"):
        placement(distilled(mesh={"fsdp": 8}), "gpu", "h100:8", 1, None)


def test_devices_that_only_sample_count_too():
    policy = {"algorithm": {"name": "grpo", "group_size": 4}, "reward": {"functions": ["number"]}}
    data = {"train": "org/rows", "completion_length": 8, "max_length": 32}
    given = recipe(mesh={"fsdp": 4}, rollout={"mesh": {"devices": 4}}, data=data, **policy)
    assert placement(given, "gpu", "h100", 1, None).devices == 8
    given = recipe(rollout={"mesh": {"devices": 8}}, data=data, **policy)
    with pytest.raises(UserError, match=r"beside the 8 that only teach or sample, and --topology h100:8 has 8"):
        placement(given, "gpu", "h100:8", 1, None)


@pytest.mark.parametrize(
    ("mesh", "options", "words"),
    [
        ("auto", {"topology": None}, "--topology is missing: say which devices, e.g. --topology h100:16"),
        ({"fsdp": 16}, {"topology": None}, "--topology h100:16 (mesh is for 16)"),
        (
            "auto",
            {"topology": "h100"},
            "--topology h100: the recipe's mesh leaves the number open; give it, e.g. h100:16",
        ),
        ("auto", {"topology": "h10:16"}, "'h10' is not known. Did you mean 'h100'?"),
        ("auto", {"topology": "v5e:4x4"}, "--topology v5e:4x4: this target has GPUs, one of h100, h200"),
        ("auto", {"topology": "h100:4x4"}, "after h100: comes the number of GPUs, e.g. h100:8"),
        ("auto", {"topology": "h100:12"}, "12 devices do not fill hosts of 8; see --per-host"),
        ({"fsdp": 8}, {}, "mesh is for 8 devices, and --topology h100:16 has 16: change one of them, e.g. mesh=auto"),
        ({"tensor": 3}, {}, "mesh needs a multiple of 3 devices, and --topology h100:16 has 16"),
        ({"tensor": 32}, {}, "mesh needs a multiple of 32 devices"),
        ("auto", {"slices": 2}, "--slices: it means nothing with --target slurm; leave it out"),
        ("auto", {"image": "a"}, "--image: it means nothing with --target slurm"),
        ("auto", {"name": "My_Run"}, "--name My_Run: at most 40 lower-case letters, digits and hyphens"),
        ("auto", {"secrets": (("HF_TOKEN", "hf_abc"),)}, "--secret HF_TOKEN=...: name the file that holds it"),
        ("auto", {"secrets": (("hf_abc", ""),)}, "--secret hf_abc=...: name the file"),
    ],
)
def test_what_slurm_needs(mesh: Any, options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=re.escape(words)):
        job("slurm", recipe(mesh=mesh), **options)


@pytest.mark.parametrize(
    ("target", "options", "words"),
    [
        ("gke-tpu", {"topology": "v5e:3x3"}, "--topology v5e:3x3: shapes of v5e are 1x1, 2x2"),
        ("gke-tpu", {"topology": "h100:8"}, "this target has TPUs, one of v5e, v5p, v6e"),
        ("gke-tpu", {"topology": None}, "e.g. --topology v5e:4x4"),
        (
            "gke-tpu",
            {"image": None},
            "--image is missing: there is no public one. Build an image with `pip install '.[tpu]'`",
        ),
        ("pathways", {"image": None}, "`pip install '.[pathways,gcs]'`"),
        ("pathways", {"pathways_dir": None}, "--pathways-dir is missing"),
        ("pathways", {"pathways_dir": "/tmp"}, "--pathways-dir is missing: a folder that exists"),
        ("gke-gpu", {"pathways_dir": "gs://a/b"}, "--pathways-dir: it means nothing with --target gke-gpu"),
        ("gke-gpu", {"setup": ("a",), "sbatch": ("b",)}, "--setup, --sbatch: it means nothing with --target gke-gpu"),
        (
            "gke-gpu",
            {"secrets": (("HF_TOKEN", "hf_ABCdef"),)},
            "name a Secret and its key, e.g. hf/token, not the secret",
        ),
        ("gke-gpu", {"secrets": (("HF-TOKEN", "hf/token"),)}, "--secret: write VARIABLE=WHERE"),
    ],
)
def test_what_kubernetes_needs(target: str, options: dict[str, Any], words: str):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        job(target, **options)
    assert "hf_ABCdef" not in str(error.value)


def test_no_slice_has_the_size_of_the_mesh():
    with pytest.raises(UserError, match="--topology v5e: no slice has 12 devices, as mesh asks for"):
        placement(recipe(mesh={"fsdp": 12}), "tpu", "v5e", 1, None)
    with pytest.raises(UserError, match="--topology v5e:4x4 x 2 slices has 32"):
        placement(recipe(mesh={"fsdp": 16}), "tpu", "v5e:4x4", 2, None)


@pytest.mark.parametrize(
    ("output", "name"),
    [("/runs/SFT_gemma.2", "sft-gemma-2"), ("/runs/2024", "run-2024"), ("/runs/" + "long-" * 12, "long-" * 7 + "long")],
)
def test_the_name_is_the_run_folder_s(output: str, name: str):
    assert job("gke-gpu", recipe(output=output)).name == name


@pytest.mark.parametrize("text", ["runs", ":/runs", "runs:", "runs:/", "runs:runs"])
def test_a_mount_is_a_claim_and_a_path(text: str):
    assert mount_of("runs:/runs/") == ("runs", "/runs")
    with pytest.raises(UserError, match=f"--mount {text}: write CLAIM:/path"):
        mount_of(text)


def test_a_run_on_a_pod_s_own_disk_is_refused():
    with pytest.raises(UserError, match=r"output: runs/x is on the pod's own disk.*--mount CLAIM:/runs output=/runs/x"):
        job("gke-gpu", recipe(output="runs/x"))
    with pytest.raises(UserError, match=r"checkpoint.folder: /ckpt/x is on the pod's own disk"):
        job("gke-gpu", recipe(checkpoint={"folder": "/ckpt/x"}))
    assert job("gke-gpu", recipe(checkpoint={"folder": "gs://bucket/x"})).warnings == ()


def test_what_else_is_lost_with_a_pod_is_said():
    given = recipe(output="runs/x", checkpoint={"folder": "gs://bucket/x"})
    (warning,) = job("gke-gpu", given).warnings
    assert warning.startswith("output: runs/x is on the pod's own disk: checkpoints stay, but metrics.jsonl")


@pytest.mark.parametrize("place", ["/tmp/x", "/dev/shm/runs/x", "/var/tmp/x"])
def test_a_disk_of_one_node_is_refused(place: str):
    with pytest.raises(UserError, match=f"output: {place} is on each node's own disk"):
        job("slurm", recipe(output=place))
    with pytest.raises(UserError, match=f"checkpoint.folder: {place} is on each node's own disk"):
        job("slurm", recipe(checkpoint={"folder": place}))


def test_files_of_this_machine_have_to_be_where_the_pods_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match=r"data.train: rows.jsonl is on this machine, and the pods do not see it"):
        job("gke-gpu", recipe(data={"train": "rows.jsonl"}))
    assert job("slurm", recipe(data={"train": "rows.jsonl"})).files == {}
    # A volume may be mounted here as well.
    volume = ("rows", str(tmp_path))
    of = recipe(data={"train": f"{tmp_path}/rows.jsonl"})
    assert job("gke-gpu", of, mounts=(("runs", "/runs"), volume)).files == {}


def test_a_choice_is_no_file_though_one_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("tunix", "sft", "train", "cosine"):
        (tmp_path / name).mkdir()
    assert job("gke-gpu", recipe(rollout={"engine": "tunix"}, optimizer={"schedule": "cosine"})).files == {}


def test_code_goes_along_from_the_current_folder_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.py").write_text("def train(): return []\n")
    assert job("gke-gpu", recipe(data={"train": "rows.py:train"})).files == {"rows.py": "def train(): return []\n"}
    with pytest.raises(UserError, match=r"data.train: .*rows.py goes along with the job, from the current folder down"):
        job("gke-gpu", recipe(data={"train": f"{tmp_path}/rows.py:train"}))
    (tmp_path / "rows.py").write_text("#" * 1_000_000)
    with pytest.raises(UserError, match=r"rows.py: 1,000,000 bytes, and 900,000 go along: put them into the image"):
        job("gke-gpu", recipe(data={"train": "rows.py:train"}))


def test_every_stage_is_checked():
    stages = [{"steps": 1}, {"steps": 1, "mesh": {"fsdp": 8}}]
    staged = recipe(stages=stages)
    with pytest.raises(UserError, match=re.escape("stages.1.mesh is for 8 devices")):
        job_of(staged, Options("slurm", **EXTRAS["slurm"]))
