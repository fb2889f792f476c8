"""`python -m benchmarks.serve`: `tunix serve` under many requests, beside `engine.run` and, where there is one, vLLM.

The small Llama shape with random weights. The same 256 requests by a call of the engine in this process and over HTTP,
in turns; 200 streams and then 2,000 long polls of the Tinker door at once, of which none may be lost or come twice, and
after which the server has the memory that it had; and a conversation of eight turns, of which each computes what is
new. TUNIX_VLLM names the Python of an environment with vLLM (docs/guide/servers.md).
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.servers import PYTHON, WHY, ours, real
from benchmarks.shapes import SHAPES
from tunix.config import MeshConfig
from tunix.data.tokenizer import bytes_tokenizer
from tunix.hf.model_folder import save_folder
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.mesh import build_mesh
from tunix.models.model import Model
from tunix.serving.tinker.wire import MESSAGES
from tunix.types import Request, Sampling

REQUESTS, STREAMS, PROMPT, NEW, SLOTS, LENGTH = 256, 200, 64, 64, 64, 1024
TURNS, SAID = 8, 24
POLLS, SHORT = 2000, 4
"""Long polls at once, and tokens that each waits for."""


def bodies(model: str, number: int) -> list[dict[str, Any]]:
    """Requests of one length, each with a prompt and a seed of its own."""
    rng = np.random.default_rng(0)
    settings = {"max_tokens": NEW, "temperature": 0.8, "ignore_eos": True, "return_token_ids": True}
    prompts = rng.integers(10, 200, (number, PROMPT)).tolist()
    return [{"model": model, "prompt": prompt, "seed": i, **settings} for i, prompt in enumerate(prompts)]


async def whole(url: str, asked: Sequence[dict[str, Any]]) -> float:
    """Seconds in which all requests are answered, sent at once."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        began = time.monotonic()
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in asked))
        seconds = time.monotonic() - began
    for answer in answers:
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["choices"][0]["token_ids"]) == NEW
    return seconds


async def streamed(url: str, asked: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Seconds until the first token of each stream, and between two parts of one; every token comes once."""
    firsts, gaps = list[float](), list[float]()

    async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        last, tokens, ended = time.monotonic(), 0, False
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            async for line in response.aiter_lines():
                ended |= line == "data: [DONE]"
                if not line or ended:
                    continue
                new = sum(len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"])
                if new:
                    (gaps if tokens else firsts).append(time.monotonic() - last)
                    last, tokens = time.monotonic(), tokens + new
        assert (tokens, ended) == (NEW, True)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits, trust_env=False) as client:
        await asyncio.gather(*(one(client, body) for body in asked))
    assert len(firsts) == len(asked)
    return firsts, gaps


async def polled(url: str, model: str) -> float:
    """Seconds in which as many samples are there as are polled for at once, each answered once."""
    rng, limits = np.random.default_rng(2), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"{url}/api/v1", timeout=None, limits=limits, trust_env=False) as client:

        async def post(path: str, body: dict[str, Any]) -> httpx.Response:
            return await client.post(f"/{path}", json=body)

        session = (await post("create_session", {"sdk_version": "0.38.0"})).json()["session_id"]
        sampler = {"session_id": session, "sampling_session_seq_id": 0, "base_model": model}
        name = (await post("create_sampling_session", sampler)).json()["sampling_session_id"]

        async def sample(number: int, prompt: list[int]) -> bytes:
            body = {"sampling_session_id": name, "seq_id": number, "prompt": {"chunks": [{"tokens": prompt}]}}
            body |= {"sampling_params": {"max_tokens": SHORT, "seed": number, "stop": []}}
            asked = {"request_id": (await post("asample", body)).json()["request_id"]}
            while (answer := await post("retrieve_future", asked)).status_code == 408:
                pass
            return answer.content

        began = time.monotonic()
        prompts = rng.integers(10, 200, (POLLS, 8)).tolist()
        answers = await asyncio.gather(*(sample(number, prompt) for number, prompt in enumerate(prompts)))
        seconds = time.monotonic() - began
        for answer in answers:
            (sequence,) = MESSAGES["SampleResponse"].FromString(answer).sequences
            assert len(sequence.tokens) == 4 * SHORT, "int32"
        await post(f"sessions/{session}/finish", {})
    return seconds


def resident() -> float:
    """MB of memory that the server holds: the first process that this one has started (Linux)."""
    here = os.getpid()
    child = Path(f"/proc/{here}/task/{here}/children").read_text().split()[0]
    return int(Path(f"/proc/{child}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def conversation(url: str, model: str) -> list[tuple[int, int]]:
    """Tokens of each turn's prompt, and how many of them were computed."""
    rng, prompt, turns = np.random.default_rng(1), list[int](), list[tuple[int, int]]()
    for _ in range(TURNS):
        prompt += rng.integers(10, 200, SAID).tolist()
        before = _prefilled(url)
        body = {"model": model, "prompt": prompt, "max_tokens": 32, "ignore_eos": True, "return_token_ids": True}
        (choice,) = httpx.post(f"{url}/v1/completions", json=body, timeout=None).json()["choices"]
        turns.append((len(prompt), _prefilled(url) - before))
        prompt += choice["token_ids"]
    return turns


def _prefilled(url: str) -> int:
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return int(next(line for line in lines if line.startswith("tunix_prefilled_tokens_total")).split()[1])


def main() -> int:
    """Measures, and prints tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    turns = parser.parse_args().turns
    if PYTHON is None:
        print(f"no vLLM: {WHY}", file=sys.stderr)
    rates, waits = Table("256 requests", "tokens/s", "lowest", "highest"), Table("200 streams", "p50 ms", "p99 ms")
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folder, config = Path(place, "model"), SHAPES["small"].config
        model, mesh = Model(config, dtype="float32"), build_mesh(MeshConfig())
        params = model.init(jax.random.key(0), dict.fromkeys(model.shapes, "float32"), mesh)
        save_folder(folder, config, params, source=None, dtype="float32")
        bytes_tokenizer("llama3").save(folder)
        words = ("--slots", str(SLOTS))
        urls = {"tunix serve": stack.enter_context(ours(folder, Path(place, "log"), *words, length=LENGTH))}
        if PYTHON is not None:
            whole_prompts = ("--max-num-batched-tokens", str(REQUESTS * PROMPT))  # divided ones with seeds end it
            urls["vLLM"] = stack.enter_context(real(folder, Path(place, "log.vllm"), *whole_prompts, length=LENGTH))
        engine = InferenceModel(InferenceOptions(str(folder), slots=SLOTS, length=LENGTH)).engine
        asked, seconds = bodies(str(folder), REQUESTS), dict[str, list[float]]()
        sampling = Sampling(NEW, temperature=0.8)
        requests = [Request(np.array(x["prompt"], np.int32), sampling, x["seed"]) for x in asked]
        for _ in range(turns + 1):  # the first compiles
            began = time.monotonic()
            engine.run(requests)
            seconds.setdefault("engine.run", []).append(time.monotonic() - began)
            for name, url in urls.items():
                seconds.setdefault(name, []).append(asyncio.run(whole(url, asked)))
        for name, each in seconds.items():
            speeds = [REQUESTS * NEW / x for x in each[1:]]
            rates.add_row(name, *(f"{x:.0f}" for x in (statistics.median(speeds), min(speeds), max(speeds))))
        for name, url in urls.items():
            firsts, gaps = asyncio.run(streamed(url, bodies(str(folder), STREAMS)))
            for what, values in (("first token", firsts), ("between parts", gaps)):
                waits.add_row(f"{name}, {what}", *(f"{1000 * np.percentile(values, p):.0f}" for p in (50, 99)))
        console = Console(width=100)
        console.print(rates, waits)
        console.print(
            "conversation, tokens of the prompt and computed:", conversation(urls["tunix serve"], str(folder))
        )
        stack.pop_all().close()
        # Places for adapters make every token of so small a model a good deal dearer.
        words = (*words, "--train", str(Path(place, "adapters")))
        with ours(folder, Path(place, "log.train"), *words, length=64) as url:
            for _ in range(turns):
                time_of_polls, memory = asyncio.run(polled(url, str(folder))), resident()
                console.print(f"{POLLS} long polls: {time_of_polls:.1f} s; the server holds {memory:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
