"""A reward model at work: scores of completions, on the device and in batches of one shape.

Where it reads the policy's own tokens (same vocabulary and special tokens), prompt and completion are scored as they
were drawn. Else they are rendered anew, with the reward model's tokenizer and chat template. The score is the value of
the state behind the last token; a completion that is too long for the model has none, and fails.

Axes: T time.
"""

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from tunix.algorithms.reward.algorithm import with_spare
from tunix.config import DType
from tunix.data.columns import as_messages
from tunix.data.config import DataConfig
from tunix.data.pipeline import Prompt
from tunix.data.rendered import asked, render_completion
from tunix.data.shapes import Rendering
from tunix.data.tokenizer import Tokenizer
from tunix.errors import UserError
from tunix.hf.source import Source, check_vocabulary, gives_scores, loaded, pretrained
from tunix.models.model import Params
from tunix.rollout.collect import Judge
from tunix.rollout.rewards.base import Failure, Score
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Cut, rows_per_pass
from tunix.types import Completion

TOGETHER = 64
"""Completions of a call on the device, of which fewer may be filled: one shape, compiled once."""


@dataclass(frozen=True, eq=False)
class RewardModel:
    """Weights that give scores, and how completions are put to them."""

    scorer: Scorer
    params: Params
    limit: int
    """Tokens of prompt and completion at most."""
    tokenizer: Tokenizer | None
    """Renders texts anew; None where the policy's own tokens are scored."""
    how: Rendering
    """How, where they are."""

    def scores(self, prompts: List[Prompt], completions: List[Completion], texts: List[str]) -> list[Score]:
        """A score of each completion, or why it has none.

        Args:
            prompts: what each answers.
            completions: as they were drawn.
            texts: their texts, without special tokens.
        """
        read = [self._read(*each) for each in zip(prompts, completions, texts, strict=True)]
        fitting = [tokens for tokens in read if not isinstance(tokens, Failure)]
        found = iter(self.of_tokens(fitting))
        return [tokens if isinstance(tokens, Failure) else next(found) for tokens in read]

    def of_tokens(self, sequences: List[np.ndarray]) -> list[float]:
        """The score of each `[T]` sequence of ids, none longer than `limit`."""
        parts = [sequences[i : i + TOGETHER] for i in range(0, len(sequences), TOGETHER)]
        return [
            float(values[-1])
            for part in parts
            for values in self.scorer.values(self.params, [with_spare(tokens) for tokens in part], TOGETHER)
        ]

    def _read(self, prompt: Prompt, completion: Completion, text: str) -> np.ndarray | Failure:
        """The tokens that are scored."""
        if self.tokenizer is None:
            tokens = np.concatenate([prompt.tokens, completion.tokens])
        else:
            try:
                tokens = self._rendered(self.tokenizer, prompt, completion, text)
            except UserError as error:
                return Failure(f"model cannot read it: {error}")
        if len(tokens) > self.limit:
            return Failure(f"model reads {self.limit} tokens (reward.model_length), and these are {len(tokens)}")
        return tokens

    def _rendered(self, tokenizer: Tokenizer, prompt: Prompt, completion: Completion, text: str) -> np.ndarray:
        before = prompt.row.get("messages", prompt.row.get("prompt", prompt.text))
        if isinstance(before, str):
            tokens, mask = render_completion(before, text, prompt.row, tokenizer, self.how)
        else:
            said = [{"role": "assistant", "content": text}]
            tokens, mask = render_completion(asked(as_messages(before)), said, prompt.row, tokenizer, self.how)
        if not mask.any():
            raise UserError("nothing of the completion is left in its rendering")
        # Up to the stop token, as the model was trained; one that was cut off has not said that it is done.
        last = int(np.flatnonzero(mask)[-1])
        unfinished = completion.finish == "length" and int(tokens[last]) in tokenizer.stop_ids
        return tokens[: last + (not unfinished)]


def judge(config: RewardConfig, policy: Tokenizer | None, data: DataConfig, dtype: DType, mesh: Mesh) -> Judge | None:
    """The reward model of a `reward` section with its weights on the mesh; None where it names none.

    Args:
        config: the section.
        policy: the tokenizer of the model that writes the completions.
        data: how long they may be, and how its prompts are rendered.
        dtype: of the computation and the weights.
        mesh: where the weights live; those of the policy's mesh.

    Raises:
        UserError: there is no such model, it gives no scores, or it cannot read what the policy writes.
    """
    if config.model is None:
        return None
    source = pretrained(config.model)
    if not gives_scores(source):
        raise UserError(
            f"reward.model: {config.model} has no score.weight: it is no reward model. Train one with `algorithm: "
            "{name: reward}`, or name a sequence classifier of transformers with one label"
        )
    check_vocabulary(source)
    own = reads_tokens(source.tokenizer, policy, config.model)
    limit = _limit(config, source, data, own)
    model, params = loaded(source, dtype, mesh)
    length = limit + 1
    cut = Cut(rows_per_pass(mesh, TOGETHER, None, length, packing=True), mesh)
    how = Rendering("prompt_completion", chat=data.chat, system=data.system, template_kwargs=data.template_kwargs)
    found = RewardModel(Scorer(model, cut, length), params, limit, None if own else source.tokenizer, how)
    return Judge("model", config.model_weight, found.scores)


def reads_tokens(judge: Tokenizer | None, policy: Tokenizer | None, name: str) -> bool:
    """Whether a reward model's ids mean what the policy's mean.

    Args:
        name: of the reward model, for messages.

    Raises:
        UserError: one has a tokenizer and the other has none, so that it cannot be told.
    """
    if judge is None or policy is None:
        if judge is policy:
            return True
        bare = f"{name} has" if judge is None else "the policy has"
        raise UserError(f"reward.model: {bare} no tokenizer, so nothing tells what the one's ids mean to the other")
    mine, theirs = ((t.bos_id, t.eos_id, t.hf.get_vocab()) for t in (judge, policy))
    return mine == theirs


def _limit(config: RewardConfig, source: Source, data: DataConfig, own: bool) -> int:
    """Tokens of prompt and completion that the reward model reads."""
    most = source.decoder.max_positions
    if config.model_length is None:
        # Another tokenizer may need more tokens for the same text.
        return min(most, data.max_length if own else 2 * data.max_length)
    if config.model_length > most:
        raise UserError(f"reward.model_length: {config.model_length} is more than the {most} tokens of {config.model}")
    return config.model_length
