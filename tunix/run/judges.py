"""Builds the judges of a recipe: a reward model, and who reads a rubric: a server, or a frozen model in this process.

A folder is loaded beside the policy. `base` borrows the frozen base of the policy's own engine (`Engine.borrow`), so
that under an adapter it takes no memory but for the keys and values of what it reads. Verdicts are sampled greedily.
"""

from collections.abc import Sequence as List
from concurrent.futures import Future
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.data.chat import Message
from tunix.data.config import DataConfig
from tunix.distributed import processes
from tunix.errors import Failure, UserError
from tunix.hf.source import Source
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.collect import Judge
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.shapes import NoRoom
from tunix.rollout.judging import RubricJudge
from tunix.rollout.rewards.config import RewardConfig
from tunix.rollout.rewards.rubric import read_rubric
from tunix.rollout.servers.chat import ChatServer
from tunix.run.reward_model import judge as reward_model
from tunix.types import Request, Sampling, Workload

BASE = "base"
"""The name of the policy's frozen base."""


def judges_of(
    rewards: RewardConfig,
    policy: Source,
    data: DataConfig,
    dtype: DType,
    mesh: Mesh,
    folder: Path | None = None,
    sampler: Future[Any] | None = None,
) -> tuple[Judge, ...]:
    """The reward model and the judge of a `reward` section, as far as it names them.

    Args:
        rewards: the section.
        policy: the model whose completions are judged, and its tokenizer.
        data: the limits of completions, and how prompts are rendered.
        dtype: of a model that is loaded.
        mesh: the devices of a reward model.
        folder: where verdicts are stored; None where they are not.
        sampler: the policy's, once it is there; None where nothing trains: then there is no base, nor is there a pair.

    Raises:
        UserError: the rubric cannot be read, the server does not answer, or the model cannot judge.
    """
    scored = reward_model(rewards, policy.tokenizer, data, dtype, mesh)
    judges = () if scored is None else (scored,)
    if (config := rewards.judge) is None:
        return judges
    where, rubric = f"reward.judge.model: {config.model}", read_rubric(config.rubric, config.scale)
    if config.pairwise and sampler is None:
        raise UserError("reward.judge.pairwise compares two answers, and a row has one: say --reward, or --task loss")
    if policy.tokenizer is None:
        raise UserError("reward.judge: the policy has no tokenizer, so that there is no text to judge")
    if config.is_server:
        server = ChatServer(config)
        identity = f"{config.model} {server.served}"
        return (*judges, RubricJudge(config, rubric, identity, server, folder, server.close).judge)
    if processes.number() > 1:
        raise UserError(
            f"{where} is loaded in one process, and there are {processes.number()}: judge on a server "
            "(http://HOST/v1), which all of them can ask"
        )
    is_base = config.model == BASE
    if is_base and sampler is None:
        raise UserError(f"{where} is that of a run while it trains: name its folder")
    options = InferenceOptions((policy.name or BASE) if is_base else config.model, None, dtype, config.concurrency)
    model = InferenceModel(options, policy if is_base else None)
    sampling = model.with_stop_ids(Sampling(config.max_tokens, temperature=0.0))
    if model.tokenizer is None:
        raise UserError(f"{where} has no tokenizer, so that it reads no text")
    bare = rubric.comparison("", "", "") if config.pairwise else rubric.question("", "")
    try:
        shortest = len(_prompt(model, [{"role": "user", "content": bare}])) + config.max_tokens
    except UserError as error:
        raise UserError(f"{where} cannot judge by {config.rubric}: {error}") from error
    # Another tokenizer may need more tokens for the same text; the second question has the first reply in it.
    spare = 2 * data.max_length * (1 + config.pairwise) + 2 * config.max_tokens + 512
    model = InferenceModel(replace(options, length=config.length or shortest + spare), model.source)
    if model.limit <= shortest:
        raise UserError(
            f"{where}: the rubric and its question with max_tokens, {shortest} tokens, leave no room for an answer in "
            f"{model.limit} (reward.judge.length, or the model's own limit): raise it, lower max_tokens, or shorten "
            "the rubric"
        )

    room = model.limit - sampling.max_tokens
    loaded = None if is_base else model.engine  # whose weights are read before the run begins

    @cache  # the first call compiles for all others
    def warm_engine() -> Engine:
        if (engine := loaded) is None:
            assert sampler is not None
            owner: Engine = sampler.result(0)
            plain = replace(owner.model, adapt=None, has_scalar_head=False)
            try:
                engine = Engine(plain, owner.mesh, max_length=model.limit, slots=config.concurrency, room=owner.room)
            except NoRoom as error:
                raise UserError(f"reward.judge: {error}; or lower reward.judge.concurrency") from error
            engine.borrow(owner)
        engine.warm(Workload(engine.slots, room, model.limit))
        return engine

    def ask(conversations: List[List[Message]]) -> list[str | Failure]:
        engine = warm_engine()
        prompts: list[np.ndarray | Failure] = []
        for messages in conversations:
            try:
                tokens = _prompt(model, messages)
            except UserError as error:
                prompts.append(Failure(f"judge cannot read it: {error}"))
            else:
                long = f"judge reads {room} tokens (reward.judge.length less max_tokens), and these are {len(tokens)}"
                prompts.append(tokens if len(tokens) <= room else Failure(long))
        requests = [Request(x, sampling, 0, i) for i, x in enumerate(prompts) if not isinstance(x, Failure)]
        replies = iter(engine.run(requests))
        return [x if isinstance(x, Failure) else model.text(next(replies)) or "" for x in prompts]

    files = sorted(model.source.folder.glob("*.safetensors")) if model.source.folder else []
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    identity = " ".join([options.model, dtype, *stamps])
    return (*judges, RubricJudge(config, rubric, identity, ask, folder).judge)


def _prompt(model: InferenceModel, messages: List[Message]) -> np.ndarray:
    """`[T]` tokens of a conversation; of a model that was trained on plain strings, a line for each message."""
    plain = "".join(f"{message['content']}\n" for message in messages)
    return model.prompt({"messages": messages} if model.plain_reason is None else {"prompt": plain}, "its question")
