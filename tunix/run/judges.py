"""Builds the judge of a recipe: a server, or a frozen model in this process that samples its verdicts greedily.

A folder is loaded beside the policy. `base` borrows the frozen base of the policy's own engine (`Engine.borrow`), so
that under an adapter it takes no memory but for the keys and values of what it reads.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.data.chat import Message, render_prompt
from tunix.data.config import DataConfig
from tunix.data.tokenizer import Tokenizer
from tunix.distributed import processes
from tunix.errors import Failure, UserError
from tunix.hf.source import Source
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.rollout.collect import Judge
from tunix.rollout.engine.engine import Engine
from tunix.rollout.engine.shapes import NoRoom
from tunix.rollout.judging import RubricJudge
from tunix.rollout.rewards.config import JudgeConfig, RewardConfig
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
    read = rewards.judge and rubric_judge(rewards.judge, policy, data, dtype, folder, sampler)
    return tuple(judge for judge in (scored, read) if judge is not None)


def rubric_judge(
    config: JudgeConfig,
    policy: Source,
    data: DataConfig,
    dtype: DType,
    folder: Path | None,
    sampler: Future[Any] | None,
) -> Judge:
    """The judge that reads a rubric; see `judges_of`."""
    if config.pairwise and sampler is None:
        raise UserError("reward.judge.pairwise compares two answers, and here a row has its own: say --reward")
    rubric = read_rubric(config.rubric, config.scale)
    if policy.tokenizer is None:
        raise UserError("reward.judge: the policy has no tokenizer, so that there is no text to judge")
    if config.is_server:
        server = ChatServer(config)
        judge = RubricJudge(config, rubric, f"{config.model} {server.served}", server, folder, at_once=True).judge

        def close() -> None:
            server.close()
            judge.close()

        return replace(judge, close=close)
    if processes.number() > 1:
        raise UserError(
            f"reward.judge.model: {config.model} is loaded in one process, and there are {processes.number()}: judge "
            "on a server (http://HOST/v1), as many processes as there are may ask it"
        )
    sampling, longest = Sampling(config.max_tokens, temperature=0.0), policy.decoder.max_positions
    question = rubric.comparison("", "", "") if config.pairwise else rubric.question("", "")
    # Another tokenizer may need more tokens for the same text; the second question has the first reply in it.
    spare = 2 * data.max_length * (1 + config.pairwise) + 2 * config.max_tokens + 64
    if config.model == BASE:
        if sampler is None:
            raise UserError("reward.judge.model: base is that of a run while it trains; name its folder")
        tokenizer = policy.tokenizer
        chats, kwargs = tokenizer.chat_template is not None, data.template_kwargs

        def render(messages: List[Message]) -> np.ndarray:
            if chats:
                return render_prompt(messages, tokenizer, **kwargs).tokens
            return np.asarray(tokenizer.encode(_plain(messages), bos=tokenizer.adds_bos), np.int32)

        length = min(config.length or len(render(_asked(question))) + spare, longest)
        sampling, identity = replace(sampling, stop_ids=policy.stop_ids), f"base of {policy.name}"

        def engine() -> Engine:
            assert sampler is not None
            of_policy: Engine = sampler.result(0)
            model = replace(of_policy.model, adapt=None, has_scalar_head=False)
            try:
                judging = Engine(
                    model,
                    of_policy.mesh,
                    max_length=length,
                    slots=config.concurrency,
                    decode=tokenizer.decode,
                    room=of_policy.room,
                )
            except NoRoom as error:
                raise UserError(f"reward.judge: {error}; or fewer of reward.judge.concurrency") from error
            judging.borrow(of_policy)
            return judging

    else:
        options = InferenceOptions(config.model, None, dtype, config.concurrency)
        reader = InferenceModel(options)
        if reader.source.has_scalar_head:
            raise UserError(
                f"reward.judge.model: {config.model} is a reward model, which writes no verdict: it is for reward.model"
            )
        if reader.tokenizer is None:
            raise UserError(f"reward.judge.model: {config.model} has no tokenizer, so that it reads no text")
        tokenizer = reader.tokenizer

        def render(messages: List[Message]) -> np.ndarray:
            plain = reader.plain_reason is not None
            return reader.prompt({"prompt": _plain(messages)} if plain else {"messages": messages}, "the question")

        length = min(config.length or len(render(_asked(question))) + spare, reader.source.decoder.max_positions)
        inference = InferenceModel(replace(options, length=length))
        sampling, identity = inference.with_stop_ids(sampling), f"{config.model} {_stamp(inference.source)} {dtype}"
        loaded = inference.engine

        def engine() -> Engine:
            return loaded

    if length <= config.max_tokens + len(render(_asked(question))):
        raise UserError(
            f"reward.judge: {len(render(_asked(question)))} tokens of the rubric and its question and max_tokens "
            f"{config.max_tokens} leave no room for an answer in {length} (length, or the model's limit): raise "
            "length, lower max_tokens, shorten the rubric, or take another model"
        )
    return RubricJudge(
        config, rubric, identity, _asking(engine, render, tokenizer, sampling, length), folder, at_once=False
    ).judge


def _asking(
    engine: Callable[[], Engine],
    render: Callable[[List[Message]], np.ndarray],
    tokenizer: Tokenizer,
    sampling: Sampling,
    length: int,
) -> Callable[[List[List[Message]]], list[str | Failure]]:
    """What asks a model in this process: programs are compiled at its first call, for all others."""
    ready: list[Engine] = []

    def ask(conversations: List[List[Message]]) -> list[str | Failure]:
        if not ready:
            ready.append(engine())
            ready[0].warm(Workload(ready[0].slots, length - sampling.max_tokens, length))
        prompts: list[np.ndarray | Failure] = []
        for messages in conversations:
            try:
                tokens = render(messages)
            except UserError as error:
                prompts.append(Failure(f"judge cannot read it: {error}"))
                continue
            room = length - sampling.max_tokens
            prompts.append(
                tokens
                if len(tokens) <= room
                else Failure(
                    f"judge reads {room} tokens (reward.judge.length less max_tokens), and these are {len(tokens)}"
                )
            )
        requests = [Request(x, sampling, 0, i) for i, x in enumerate(prompts) if not isinstance(x, Failure)]
        replies = iter(ready[0].run(requests))
        return [
            x if isinstance(x, Failure) else tokenizer.decode(next(replies).tokens, skip_special=True) for x in prompts
        ]

    return ask


def _asked(question: str) -> list[Message]:
    return [{"role": "user", "content": question}]


def _plain(messages: List[Mapping[str, Any]]) -> str:
    """A conversation for a model without a chat template."""
    return "".join(f"{message['content']}\n" for message in messages)


def _stamp(source: Source) -> str:
    """Which files a model's weights are: verdicts of a model that is trained anew are no longer its own."""
    folders = [folder for folder in (source.folder, source.merged) if folder is not None]
    files = [file for folder in folders for file in sorted(folder.glob("*.safetensors"))]
    return " ".join(f"{file.name} {(stat := file.stat()).st_size} {stat.st_mtime_ns}" for file in files)
