"""tunix's own server: what it samples is what the engine samples, whoever else asks; what it cannot do, it refuses."""

import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from benchmarks import servers
from tests.marks import slow
from tests.run.test_rl_run import steps
from tests.tiny_rl import write_policy
from tests.tiny_runs import metrics, model_folder, train
from tunix.cli import main
from tunix.data.tokenizer import bytes_tokenizer
from tunix.distributed.meeting import Place, join
from tunix.errors import UserError
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.lora.adapt import adapt
from tunix.lora.config import AdapterConfig
from tunix.lora.multi_lora import LoadedAdapter
from tunix.models.config import is_adapter
from tunix.models.model import Model
from tunix.serving.service import HALF, Service
from tunix.serving.tinker.futures import Refusal
from tunix.types import Request, Sampling

Serve = Callable[..., tuple[Service, str]]


def body(number: int, **changes: Any) -> dict[str, Any]:
    """A request of a length of its own."""
    settings = {"max_tokens": 3 + 5 * number % 30, "seed": (7 << HALF) + number, "temperature": 0.8, "logprobs": 0}
    return {"prompt": list(range(5, 8 + number % 9)), "ignore_eos": True, "return_token_ids": True} | settings | changes


def asked(url: str, given: dict[str, Any], model: Path) -> dict[str, Any]:
    """The choice that is answered."""
    answer = httpx.post(f"{url}/v1/completions", json={"model": str(model), **given}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def numbers(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_answers_are_the_engines_whoever_else_asks(model: Path, serve: Serve):
    """Twenty requests for four slots, in three waves that meet."""
    _, url = serve(slots=4)
    alone = [numbers(asked(url, body(i), model)) for i in range(20)]
    with ThreadPoolExecutor(20) as pool:

        def later(number: int) -> tuple[list[int], list[float]]:
            time.sleep(0.02 * (number % 3))
            return numbers(asked(url, body(number), model))

        together = list(pool.map(later, range(20)))
    assert [ids for ids, _ in together] == [ids for ids, _ in alone]
    np.testing.assert_allclose(
        np.concatenate([x for _, x in together]), np.concatenate([x for _, x in alone]), atol=1e-5
    )
    engine = InferenceModel(InferenceOptions(str(model), slots=4, length=64)).engine
    for i, (ids, logprobs) in enumerate(alone):
        given = body(i)
        sampling = Sampling(max_tokens=given["max_tokens"], temperature=0.8)
        (own,) = engine.run([Request(np.array(given["prompt"], np.int32), sampling, i, 7)])
        assert ids == own.tokens.tolist()
        np.testing.assert_allclose(logprobs, own.logprobs, atol=1e-5)


def test_text_is_answered_as_text(model: Path, serve: Serve):
    _, url = serve()
    given = {"prompt": "12+3", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    choice = asked(url, given, model)
    assert choice["finish_reason"] == "length"
    assert isinstance(choice["text"], str)
    assert "token_ids" not in choice
    assert not any(token.startswith("token_id:") for token in choice["logprobs"]["tokens"])
    named = asked(url, {**given, "return_tokens_as_token_ids": True, "return_token_ids": True}, model)
    assert named["logprobs"]["tokens"] == [f"token_id:{token}" for token in named["token_ids"]]
    # As the tokenizer's own encoding has it: after BOS, unless it is told otherwise.
    (bos, *rest) = named["prompt_token_ids"]
    assert rest == bytes_tokenizer("llama3").encode("12+3")
    for special, ids in ((True, [bos, *rest]), (False, rest)):
        said = {"prompt": "12+3", "add_special_tokens": special}
        assert httpx.post(f"{url}/tokenize", json=said, timeout=60).json()["tokens"] == ids
    # By their ids: two of these tokens are no characters, and have one text.
    for value, listed in zip(named["logprobs"]["token_logprobs"], named["logprobs"]["top_logprobs"], strict=True):
        assert len(listed) == 2
        assert max(listed.values()) == value, "greedy"


def test_other_weights_are_loaded_and_bad_ones_are_not(model: Path, serve: Serve, tmp_path: Path):
    _, url = serve()
    other = model_folder(tmp_path / "other", seed=1)
    narrow = model_folder(tmp_path / "narrow", hidden_size=16)

    def load(folder: Path) -> httpx.Response:
        told = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        return httpx.post(f"{url}/collective_rpc", json=told, timeout=120)

    first = numbers(asked(url, body(3), model))
    for folder, says in ((narrow, "another structure"), (tmp_path / "nowhere", "nowhere")):
        refused = load(folder)
        assert refused.status_code == 400
        assert says in refused.json()["error"]["message"]
    assert numbers(asked(url, body(3), model)) == first
    assert load(other).status_code == 200
    second = numbers(asked(url, body(3), model))
    assert second[0] != first[0]
    assert load(model).status_code == 200
    assert numbers(asked(url, body(3), model)) == first


def test_a_pause_waits_for_what_has_begun_and_holds_what_comes(model: Path, serve: Serve):
    _, url = serve()
    with ThreadPoolExecutor(2) as pool:
        assert httpx.post(f"{url}/pause?mode=wait", timeout=60).json() == {"status": "paused"}
        waiting = pool.submit(asked, url, body(1), model)
        time.sleep(0.3)
        assert not waiting.done()
        assert httpx.post(f"{url}/resume", timeout=60).json() == {"status": "resumed"}
        assert waiting.result(60)["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("changes", "status", "says"),
    [
        ({"model": "another"}, 404, "The model `another` does not exist"),
        ({"prompt": [5, 100000]}, 400, "outside of the vocabulary"),
        ({"prompt": [5] * 600}, 400, "leaves no room"),
        ({"prompt": []}, 400, "has no token"),
        ({"prompt": ["1", 2]}, 400, "prompt: it is a text or a list of token ids, whole numbers"),
        ({"prompt": [[1, 2], "1"]}, 400, "or a list of several texts or lists"),
        ({"prompt": [[5], [5, 100000]]}, 400, "prompt 1 holds ids outside of the vocabulary"),
        ({"prompt": [[5]] * 100, "n": 11}, 400, "prompt: 100 with n=11 each are more than 1024 answers"),
        ({"prompt": [True, 5]}, 400, "whole numbers"),
        ({"prompt": [5, 1 << 40]}, 400, "whole numbers"),
        ({"prompt": "Hi \ud83d"}, 400, "character 4 of a text is '\\ud83d', half of a character"),
        ({"stop_token_ids": ["5"]}, 400, "stop_token_ids.0: Input should be a valid integer"),
        ({"n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ({"repetition_penalty": 1.2}, 400, "repetition_penalty: Input should be 1"),
        ({"presence_penalty": 0.5}, 400, "presence_penalty: Input should be 0"),
        ({"frequency_penalty": 0.5}, 400, "frequency_penalty: Input should be 0"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias: there is no such field"),
        ({"max_token": 5}, 400, "max_token: there is no such field. Did you mean 'max_tokens'?"),
        ({"best_of": 2}, 400, "best_of: there is no such field"),
        ({"echo": True, "stream": True}, 400, "stream: log-probs of a prompt (echo with logprobs) come whole"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options: they go with stream: true"),
        ({"stop": "x" * 2000}, 400, "stop"),
        ({"stop_token_ids": [1 << 40]}, 400, "stop_token_ids.0: Input should be less than"),
        ({"top_k": 1 << 40}, 400, "top_k: Input should be less than"),
        ({"temperature": float("nan")}, 400, "temperature"),
        ({"temperature": -1.0}, 400, "temperature: Input should be greater than or equal to 0"),
        ({"temperature": 1e308}, 400, "temperature: Input should be less than or equal to 10000"),
        ({"temperature": 1e-30}, 400, "temperature: it is 0 (greedy), or at least 0.0001"),
        ({"top_p": 1e-50}, 400, "top_p: Input should be greater than"),
        ({"max_tokens": 0}, 400, "max_tokens: 0 goes with echo: true"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    shared: tuple[Service, str], changes: dict[str, Any], status: int, says: str
):
    service, url = shared
    content = json.dumps({"model": service.name, **body(0), **changes})
    answer = httpx.post(f"{url}/v1/completions", content=content, timeout=60)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("content", [b"{", b"[1]", b'{"prompt": 3}', b'{"method": "other"}'])
def test_a_body_that_cannot_be_read_is_refused(shared: tuple[Service, str], content: bytes):
    _, url = shared
    for path in ("/v1/completions", "/tokenize", "/detokenize"):
        assert httpx.post(f"{url}{path}", content=content, timeout=60).status_code == 400


def test_an_engine_that_fails_is_no_mistake_of_the_request(model: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch):
    service, url = serve()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("out of memory")

    with monkeypatch.context() as broken:
        broken.setattr(service.engine, "serve", fail)
        answer = httpx.post(f"{url}/v1/completions", json={"model": str(model), **body(0)}, timeout=60)
        assert answer.status_code == 500
    assert asked(url, body(0), model)["finish_reason"] == "length"


def test_weights_stay_while_clients_train_on_them(model: Path, serve: Serve):
    service, _ = serve(adapters=True)
    assert service.params is not None
    settings = AdapterConfig(rank=2)
    loaded = Model(service.engine.model.config, adapt=adapt(settings, service.engine.model.config))
    names = [name for name in loaded.shapes if is_adapter(name)]
    params = loaded.init(jax.random.key(0), dict.fromkeys(names, "float32"), service.engine.mesh)
    service.publish_unlisted({"a": LoadedAdapter(settings, params)})
    with pytest.raises(Refusal, match="its weights stay as they are: clients train adapters on them"):
        service.load(model)


def test_adapters_need_weights_that_are_kept(model: Path, serve: Serve, tmp_path: Path):
    _, url = serve()
    told = {"lora_name": "mine", "lora_path": str(tmp_path)}
    answer = httpx.post(f"{url}/v1/load_lora_adapter", json=told, timeout=60)
    assert answer.status_code == 400
    assert "--enable-lora" in answer.json()["error"]["message"]
    assert httpx.post(f"{url}/v1/unload_lora_adapter", json=told, timeout=60).status_code == 404
    assert httpx.post(f"{url}/v1/completions", content=b"{", timeout=60).status_code == 400


# --- Runs -------------------------------------------------------------------------------------------------------------


def numbers_of(run: str) -> list[dict[str, Any]]:
    """The metrics apart from those of time."""
    apart = ("time/", "perf/", "compile/", "rollout/trainer_waits", "rollout/sampler_waits")
    return [{key: x for key, x in row.items() if not key.startswith(apart)} for row in metrics(run)]


def alike(one: str, other: str) -> None:
    """Two runs sampled the same tokens: what shares a dispatch moves the last bits of log-probs, and nothing else."""
    for ours, theirs in zip(numbers_of(one), numbers_of(other), strict=True):
        for name in ours:
            assert theirs[name] == pytest.approx(ours[name], abs=1e-5, rel=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("adapter", [True, *slow([False])])
def test_a_run_samples_there_and_two_servers_are_one(model: Path, serve: Serve, adapter: bool):
    urls = [serve(adapter)[1] for _ in range(2)]
    changes: dict[str, Any] = {"adapter": {"rank": 4, "alpha": 16}} if adapter else {}
    changes |= {"rollout__engine": "vllm", "rollout__temperature": 0.8, "data__eval": "held.jsonl"}
    for name, used in (("two", urls), ("one", urls[:1])):
        write_policy(
            Path(), model={"path": str(model), "dtype": "float32"}, **changes, rollout__servers=used, output=name
        )
        train("r.yaml")
    rows = steps("two")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["mismatch/max"] < 1e-5 and row["mismatch/corrected"] == 0 for row in rows)
    assert any(row["train/loss"] != 0 for row in rows)
    alike("two", "one")


@pytest.mark.slow
def test_steps_are_sampled_ahead_on_servers_and_replayed(model: Path, serve: Serve):
    """Each call keeps the weights that it was promised; a run of the same record ends alike."""
    _, url = serve()
    changes = {"rollout__engine": "vllm", "rollout__servers": [url], "rollout__max_staleness": 1, "steps": 6}
    where = {"path": str(model), "dtype": "float32"}
    write_policy(Path(), model=where, **changes)
    train("r.yaml")
    rows = [row for row in metrics("run") if "rollout/staleness/max" in row]
    assert {row["rollout/staleness/max"] for row in rows} == {0, 1}
    assert all(row["mismatch/max"] < 1e-5 for row in rows if row["rollout/staleness/max"] == 0)
    record = Path("run/replay.jsonl").read_text()
    Path("run").rename("first")
    Path("run").mkdir()
    for name in ("replay.jsonl", "recipe.yaml"):
        Path("run", name).write_text(Path("first", name).read_text())
    train("r.yaml")
    assert Path("run/replay.jsonl").read_text() == record
    alike("run", "first")


def test_what_goes_on_under_new_weights_needs_our_own_engine(model: Path, capsys: pytest.CaptureFixture[str]):
    changes = {"rollout__engine": "vllm", "rollout__servers": ["http://127.0.0.1:9"], "rollout__max_staleness": 1}
    where = {"path": str(model), "dtype": "float32"}
    write_policy(Path(), model=where, **changes, rollout__in_flight="continue")
    assert main(["run", "r.yaml"]) == 2
    assert "in_flight: continue needs tunix's own engine" in capsys.readouterr().err


# --- The command ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_answers_until_it_is_told_to_end(model: Path, tmp_path: Path):
    with servers.ours(model, tmp_path / "log", "--slots", "2") as url:
        assert len(asked(url, body(2), model)["token_ids"]) == 13
    told = (tmp_path / "log").read_text()
    assert f"{url} answers, up to 128 tokens" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_tiny_model_is_there_within_seconds(tmp_path: Path):
    """Ten on a machine with nothing else to do."""
    began = time.monotonic()
    with servers.ours(None, tmp_path / "log", "--slots", "2") as url:
        assert time.monotonic() - began < 60
        (card,) = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
        assert (card["id"], card["max_model_len"]) == ("tiny", 128)
        asked = {"model": "tiny", "prompt": "a", "max_tokens": 3}
        assert httpx.post(f"{url}/v1/completions", json=asked, timeout=120).status_code == 200
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["serve", "nowhere/at/all", "--port", "{}"], "--host 127.0.0.1 --port {}"),
        (
            ["run", "nowhere.yaml", "--coordinator", "127.0.0.1:{}", "--processes", "2", "--process", "0"],
            "--coordinator 127.0.0.1:{}",
        ),
        (
            ["run", "nowhere.yaml", "--coordinator", "10.0.0.1:{}", "--processes", "2", "--process", "0"],
            "--coordinator 10.0.0.1:{}",
        ),
    ],
)
def test_a_port_that_is_taken_is_said_before_anything_else(
    words: list[str], option: str, capsys: pytest.CaptureFixture[str]
):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([word.format(port) for word in words]) == 2
    said = capsys.readouterr().err
    remedy = f"another program listens at port {port}: choose another port, or end that program"
    assert said == f"error: {option.format(port)}: Address already in use: {remedy}\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port", "70000"], "--port 70000: ports are numbers from 1 to 65535"),
        (["--host", "192.0.2.1"], "--host 192.0.2.1 --port 8000: Cannot assign requested address: choose another"),
    ],
)
def test_what_cannot_be_listened_at(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TUNIX_API_KEY", "key")
    assert main(["serve", "nowhere/at/all", *words]) == 2
    assert says in capsys.readouterr().err


def test_the_port_of_a_coordinator_from_the_environment_is_looked_at_before_processes_are_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"--coordinator {address}: Address already in use"):
            join(Place(address, 2, 0))


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]):
    assert main(["serve", "nowhere/at/all"]) == 2
    assert "nowhere/at/all" in capsys.readouterr().err
