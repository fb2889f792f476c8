"""Runs whose completions come from servers: stand-ins of vLLM, which hold what the run hands over."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.fake_vllm import FakeVLLM, served
from tests.run.test_rl_run import steps
from tests.tiny_rl import write_policy
from tests.tiny_runs import ADAPTER, files, model_folder, train
from tunix.cli import main
from tunix.errors import UserError
from tunix.recipe.recipe import Recipe


class Servers:
    """Stand-ins that serve a folder, and the recipe of a run that samples on them."""

    def __init__(self, folder: Path, number: int, stack: ExitStack):
        self.model = model_folder(folder / "llama")
        self.fakes = [FakeVLLM(self.model) for _ in range(number)]
        self.urls = [stack.enter_context(served(fake)) for fake in self.fakes]
        self.folder = folder

    def recipe(self, **changes: Any) -> Path:
        rollout = {"rollout__engine": "vllm", "rollout__servers": self.urls, "rollout__temperature": 0.7}
        model = {"path": str(self.model), "dtype": "float32"}
        return write_policy(self.folder, model=model, **{**rollout, **changes})


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, 2, stack)


@pytest.mark.slow
def test_all_weights_are_handed_over_at_each_step(servers: Servers):
    servers.recipe(data__eval="held.jsonl", eval__every=3)
    train("r.yaml")
    told = Path("run/log.txt").read_text()
    by = f"sampling: by {servers.urls[0]}, {servers.urls[1]}; handed over in a folder before each step: all weights"
    assert by in told
    rows = steps("run")
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["mismatch/max"] < 1e-4
        assert row["mismatch/corrected"] == 0
        assert "perf/rollout_idle" not in row
        assert row["perf/rollout_tokens_per_second"] > 0
    assert rows[0]["reward/mean"] != rows[1]["reward/mean"]
    for fake in servers.fakes:
        assert [name.rpartition("-")[2] for name in fake.loads] == ["0", "1", "2", "3"]
        assert fake.asked
    # 3 steps of 16 completions, and 6 held-out prompts before the first and after the last.
    assert sum(sum(fake.asked.values()) for fake in servers.fakes) == 3 * 16 + 2 * 6
    assert len(list(Path("run/weights").iterdir())) == 1


@pytest.mark.slow
def test_an_adapter_alone_is_handed_over(servers: Servers):
    servers.recipe(adapter={"rank": 4, "alpha": 16})
    train("r.yaml")
    assert "before each step: the adapter alone" in Path("run/log.txt").read_text()
    assert all(row["mismatch/max"] < 1e-4 for row in steps("run"))
    (left,) = Path("run/weights").iterdir()
    assert set(files(left)) == ADAPTER
    for fake in servers.fakes:
        assert list(fake.adapters) == [left.name]
        assert len(fake.loads) == 3
        assert fake.version == "default"


@pytest.mark.slow  # the others here hand over too
def test_a_merged_adapter_is_handed_over_where_servers_could_not_apply_it(servers: Servers):
    servers.recipe(adapter={"rank": 4, "dora": True}, steps=2)
    train("r.yaml")
    assert all(row["mismatch/max"] < 1e-3 for row in steps("run"))
    assert all(not fake.adapters and fake.version != "default" for fake in servers.fakes)


@pytest.mark.slow
def test_a_server_dies_and_the_run_goes_on(servers: Servers, caplog: pytest.LogCaptureFixture):
    servers.recipe()
    servers.fakes[0].manners.dies_after = 12
    train("r.yaml")
    assert [row["step"] for row in steps("run")] == [1, 2, 3]
    assert caplog.text.count(f"{servers.urls[0]} is asked no more") == 1
    # What it had not answered as it died was asked again, even if it was about to: of two answers one counts.
    asked = [set(fake.asked) for fake in servers.fakes]
    assert len(asked[0] | asked[1]) == 3 * 16
    assert len(asked[0]) == 12
    assert all(count == 1 for fake in servers.fakes for count in fake.asked.values())


@pytest.mark.slow
def test_where_all_die_one_line_says_so_and_the_same_command_goes_on(
    servers: Servers, capsys: pytest.CaptureFixture[str]
):
    servers.recipe(checkpoint__every=1)
    for fake in servers.fakes:
        fake.manners.dies_after = 12
    assert main(["run", "r.yaml"]) == 2
    told = capsys.readouterr().err
    assert "rollout.servers: no server is left" in told
    assert "Traceback" not in told
    for fake in servers.fakes:
        fake.manners.dies_after, fake.gone = None, False
        fake.restart(servers.model)
    # Other addresses, and fewer, are the same run.
    servers.recipe(checkpoint__every=1, rollout__servers=servers.urls[1:])
    train("r.yaml")
    rows = steps("run")
    assert sorted({row["step"] for row in rows}) == [1, 2, 3]
    assert all(row["mismatch/max"] < 1e-4 for row in rows)


@pytest.mark.slow
def test_the_gate_stops_a_run_whose_servers_lie_later(servers: Servers, capsys: pytest.CaptureFixture[str]):
    servers.recipe(rollout__mismatch_tolerance=0.2)

    class Late(FakeVLLM):
        """From the second step on it reports other log-probs, but not of the probe."""

        def complete(self, body: dict[str, Any], identity: str) -> dict[str, Any]:
            lies = sum(self.asked.values()) > 8 and not identity.startswith("tunix-probe")
            self.manners.offset = -0.5 if lies else 0.0
            return super().complete(body, identity)

    for fake in servers.fakes:
        fake.__class__ = Late
    assert main(["run", "r.yaml"]) == 2
    assert "rollout.mismatch_tolerance: at token" in capsys.readouterr().err


# --- The recipe -----------------------------------------------------------------------------------------------------

SECTIONS: dict[str, Any] = {
    "model": {"path": "google/gemma-3-1b-it"},
    "data": {"train": "rows.jsonl"},
    "output": "runs/x",
    "algorithm": {"name": "grpo"},
    "reward": {"functions": ["exact_match"]},
    "rollout": {"engine": "vllm", "servers": ["http://host:8000/", "https://other"]},
}


def build(rollout: dict[str, Any] | None = None, **sections: Any) -> Recipe:
    return Recipe.build({**SECTIONS, "rollout": {**SECTIONS["rollout"], **(rollout or {})}, **sections})


def test_correction_is_on_by_default_where_servers_sample():
    recipe = build()
    assert recipe.rollout.servers == ("http://host:8000", "https://other")
    assert (recipe.algorithm.correction, recipe.algorithm.old_logprobs) == ("truncate", "recompute")
    assert Recipe.build(recipe.sections()) == recipe
    masked = build(algorithm={"name": "ppo", "old_logprobs": "recompute", "correction": "mask"})
    assert masked.algorithm.correction == "mask"
    given = {"name": "grpo", "correction": "none"}
    assert build(algorithm=given).algorithm.correction == "none"
    assert build(algorithm={"name": "grpo", "old_logprobs": "sampler"}).algorithm.correction == "none"
    here = Recipe.build({**SECTIONS, "rollout": {}})
    assert here.algorithm.correction == "none"


def test_a_tiny_run_samples_in_its_own_process():
    tiny = build({"timeout": 5.0, "weights_folder": "/shared"}).tiny()
    assert tiny.rollout.engine == "tunix"
    assert not tiny.rollout.servers
    assert tiny.algorithm.correction == "truncate"


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"servers": []}, "engine: vllm samples on servers: name them"),
        ({"engine": "tunix"}, "servers: of no effect without engine: vllm"),
        ({"engine": "tunix", "servers": [], "timeout": 5.0}, "timeout: of no effect without engine: vllm"),
        ({"engine": "tunix", "servers": [], "weights_folder": "x"}, "weights_folder: of no effect without"),
        ({"slots": 8}, "slots: read by tunix's own engine"),
        ({"memory": 0.5, "cache_dtype": "int8"}, "memory, cache_dtype: read by tunix's own engine"),
        ({"speculate": 2}, "speculate: read by"),
        ({"mesh": {"tensor": 2}}, "mesh: read by"),
        ({"oversample": 1.5}, "oversample: read by"),
        ({"servers": ["ftp://host"]}, "'ftp://host' is no address"),
        ({"servers": ["host:8000"]}, "'host:8000' is no address"),
        ({"servers": ["http://a:b@host"]}, "a scheme, a host and a port, and no more"),
        ({"servers": ["http://host", "http://host/"]}, "http://host is named twice"),
        ({"timeout": 0}, "rollout.timeout"),
    ],
)
def test_settings_without_effect_and_wrong_addresses_are_refused(rollout: dict[str, Any], said: str):
    with pytest.raises(UserError) as caught:
        build(rollout)
    assert said in str(caught.value)


def test_rounded_activations_are_refused():
    with pytest.raises(UserError, match="rounds activations too"):
        build(quantization={"rules": [{"module": ".*", "weights": "int8", "activations": "int8"}]})


def test_addresses_may_change_between_the_parts_of_a_run():
    assert build().difference(build({"servers": ["http://third"], "timeout": 9.0})) == []
