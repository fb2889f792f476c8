"""Our worker: the client's methods, called as in a run."""

from collections.abc import Iterable
from functools import partial

from turns import reward, start

case, turn = start()

import jax  # noqa: E402  (after the cores are chosen)
import numpy as np  # noqa: E402

from benchmarks.shapes import LORA, SHAPES  # noqa: E402
from tunix.algorithms.dpo.algorithm import DPO  # noqa: E402
from tunix.algorithms.dpo.config import DPOConfig  # noqa: E402
from tunix.algorithms.grpo.algorithm import GRPO  # noqa: E402
from tunix.algorithms.grpo.config import GRPOConfig  # noqa: E402
from tunix.algorithms.sft.algorithm import SFT  # noqa: E402
from tunix.algorithms.sft.config import SFTConfig  # noqa: E402
from tunix.config import RowKind  # noqa: E402
from tunix.data.config import DataConfig  # noqa: E402
from tunix.data.examples import Examples  # noqa: E402
from tunix.data.packing import pack  # noqa: E402
from tunix.data.pipeline import Layout, Prompts  # noqa: E402
from tunix.data.sources import open_rows  # noqa: E402
from tunix.data.tokenizer import load_tokenizer  # noqa: E402
from tunix.rollout.collect import Collector, RolloutStep, RolloutStream  # noqa: E402
from tunix.rollout.engine.engine import Engine  # noqa: E402
from tunix.rollout.rewards.scorer import Scorer  # noqa: E402
from tunix.trainer.trainer import Trainer  # noqa: E402
from tunix.types import (  # noqa: E402
    Batch,
    Completion,
    Loss,
    Request,
    Sampling,
    Sequence,
)

SHAPE = SHAPES[case["shape"]]
"""Its trainer has the weights of the case's folder, which were exported from one."""


def train(trainer: Trainer, batch: Batch, loss: Loss) -> None:
    """Training steps on one batch, without end."""
    while True:
        turn()
        jax.block_until_ready((trainer.step(batch, loss), trainer.state))


def sft() -> None:
    """SFT on full rows, with all tokens but the first trained."""
    mask = np.ones(SHAPE.length, bool)
    rows = [Sequence(np.array(row, np.int32), mask) for row in case["rows"]]
    batch = pack(rows, SHAPE.rows, SHAPE.length, packing=False)
    train(SHAPE.trainer(LORA if case["lora"] else None), batch, SFT(SFTConfig()).objective)


def dpo() -> None:
    """DPO on pairs that share their prompt, with the reference computed in the step."""

    def side(prompt: list[int], answer: list[int]) -> Sequence:
        tokens = np.array(prompt + answer, np.int32)
        return Sequence(tokens, np.arange(len(tokens)) >= len(prompt))

    pairs = zip(case["prompts"], case["chosen"], case["rejected"], strict=True)
    sides = [side(prompt, answer) for prompt, *answers in pairs for answer in answers]
    limits = DataConfig(train="given", max_length=len(sides[0].tokens), completion_length=len(case["chosen"][0]))
    length = Layout(sequences_per_example=2).length(limits)
    batch = pack(sides, len(sides), length, sequences_per_example=2)
    trainer = SHAPE.trainer(rows=batch.tokens.shape[0], length=batch.tokens.shape[1], reference=True)
    train(trainer, batch, DPO(DPOConfig(beta=case["beta"])).objective)


def grpo() -> None:
    """Whole GRPO steps: rollout, reward, update."""
    prompt, new, number = len(case["prompts"][0]), case["new"], case["groups"] * case["group"]
    sampling = Sampling(max_tokens=new)
    together, length = SHAPE.together(case["group"], case["groups"], prompt + new, new)
    rows = {"length": length, "rows": number // together, "unit": together, "longest": prompt + new}
    trainer = SHAPE.trainer(**rows, reference=True)
    algorithm = GRPO(GRPOConfig(group_size=case["group"], kl=case["kl"]), sampling)
    config = DataConfig(train="given", max_length=prompt + new, completion_length=new)
    prompts = open_rows([{"prompt_ids": ids} for ids in case["prompts"]])
    examples = Examples(prompts, None, config, RowKind.PROMPT)
    tokenizer = load_tokenizer(case["weights"])
    with Scorer([reward]) as scorer:
        like = RolloutStep(
            collector=Collector(tokenizer, sampling, scorer),
            stream=Prompts(examples, seed=0),
            size=case["groups"],
            seed=0,
            packed=partial(pack, max_length=length, together=together),
            tolerance=1e-3,
        )
        data = RolloutStream(like)
        parts: dict[str, float] = {}
        while True:
            turn(**parts)
            rollouts = next(data)
            algorithm.update(trainer, rollouts)
            parts = {name: rollouts.clock[name] for name in ("rollout", "update")}


def text_of(ids: Iterable[int]) -> str:
    """A text in which one id in so many ends a turn, as random weights end none by themselves."""
    return "".join("." if i % case["every"] == 0 else "-" for i in ids)


def answer(number: int, so_far: Completion) -> np.ndarray | None:
    """What an environment says between the turns of a case that has several."""
    return np.array(case["observation"], np.int32) if len(so_far.turns) < case["turns"] else None


def generate() -> None:
    """Completions of all requests, which are handed in at once."""
    trainer = SHAPE.trainer()
    several = "turns" in case
    length = max(len(ids) + new for ids, new in zip(case["prompts"], case["new"], strict=True))
    length += case["turns"] * len(case["observation"]) if several else 0
    spec = trainer.learner.spec
    engine = Engine(spec.model, spec.mesh, slots=case["slots"], max_length=length, decode=text_of)
    engine.publish(trainer.learner.params, 0)
    ends = (".",) if several else ()
    asked = [
        Request(np.array(ids, np.int32), Sampling(max_tokens=new, stop_strings=ends), case["seed"], index)
        for index, (ids, new) in enumerate(zip(case["prompts"], case["new"], strict=True))
    ]
    tokens = 0
    while True:
        turn(tokens=tokens)
        tokens = sum(int(one.drawn.sum()) for one in engine.run(asked, answer if several else None))


{"sft": sft, "dpo": dpo, "grpo": grpo, "generate": generate}[case["kind"]]()
