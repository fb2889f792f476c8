"""Scores completions with a reward model, on the device and in batches of one shape.

Where it reads the policy's tokens (same vocabulary and special tokens), prompt and completion are scored as they were
sampled. Else they are rendered again, with the reward model's tokenizer and chat template. The score is the value of
the state after the last token; a completion that is too long for the model has no score, and fails.

Axes: T time.
"""

from collections.abc import Callable
from collections.abc import Sequence as List

import numpy as np
from jax.sharding import Mesh

from tunix.config import DType
from tunix.data.config import DataConfig
from tunix.data.examples import asked, render_completion
from tunix.data.packing import with_spare
from tunix.data.shapes import as_messages
from tunix.data.tokenizer import Tokenizer
from tunix.data.types import Prompt
from tunix.distributed.global_arrays import own_part
from tunix.errors import UserError
from tunix.hf.source import check_vocabulary, loaded, pretrained
from tunix.rollout.collect import Judge, Judged
from tunix.rollout.rewards.base import Failure
from tunix.rollout.rewards.config import RewardConfig
from tunix.trainer.logprobs import Scorer
from tunix.trainer.microbatches import Microbatcher, rows_per_microbatch
from tunix.types import Completion

TOGETHER = 64
"""Number of completions in a call on the device; a smaller batch is padded to it, so one shape is compiled."""


def judge(config: RewardConfig, policy: Tokenizer | None, data: DataConfig, dtype: DType, mesh: Mesh) -> Judge | None:
    """Loads the reward model of a `reward` section onto the mesh; None where the section names none.

    Args:
        config: the section.
        policy: the tokenizer of the model that writes the completions.
        data: the limits of completions, and how prompts are rendered.
        dtype: of the computation and the weights.
        mesh: whose devices that belong to this process hold the weights.

    Raises:
        UserError: there is no such model, it has no scalar head, or only one of it and the policy has a tokenizer:
            their token ids cannot be compared.
    """
    if config.model is None:
        return None
    source, mesh = pretrained(config.model), own_part(mesh)
    if not source.has_scalar_head:
        raise UserError(
            f"reward.model: {config.model} has no score.weight: it is no reward model. Train one with `algorithm: "
            "{name: reward}`, or name a sequence classifier of transformers with one label"
        )
    check_vocabulary(source)
    if (source.tokenizer is None) is not (policy is None):
        bare = f"{config.model} has" if source.tokenizer is None else "the policy has"
        raise UserError(f"reward.model: {bare} no tokenizer, so nothing tells what the one's ids mean to the other")
    judged, written = (x and (x.bos_id, x.eos_id, x.hf.get_vocab()) for x in (source.tokenizer, policy))
    same_tokens = judged == written
    # Another tokenizer may need more tokens for the same text.
    limit = min(source.decoder.max_positions, data.max_length if same_tokens else 2 * data.max_length)
    model, params = loaded(source, dtype, mesh)
    length = limit + 1
    scorer = Scorer(model, Microbatcher(rows_per_microbatch(mesh, TOGETHER, None, length, packing=True), mesh), length)
    # Rows have our names by now.
    tokenizer, data = None if same_tokens else source.tokenizer, data.model_copy(update={"columns": {}})

    def read(prompt: Prompt, completion: Completion, text: str) -> np.ndarray | Failure:
        """The tokens to score, or the reason why there are none."""
        if tokenizer is None:
            tokens = np.concatenate([prompt.tokens, completion.tokens])
        else:
            try:
                tokens = rendered(tokenizer, data, prompt, completion, text)
            except UserError as error:
                return Failure(f"model cannot read it: {error}")
        if len(tokens) > limit:
            return Failure(f"model reads {limit} tokens (data.max_length), and these are {len(tokens)}")
        return tokens

    def begin(prompts: List[Prompt], completions: List[Completion], texts: List[str]) -> Callable[[], list[Judged]]:
        """Begins to score completions; what it returns waits for each score, or has the reason why there is none."""
        inputs = [
            read(prompt, completion, text) for prompt, completion, text in zip(prompts, completions, texts, strict=True)
        ]
        readable = [with_spare(tokens) for tokens in inputs if not isinstance(tokens, Failure)]
        parts = [readable[i : i + TOGETHER] for i in range(0, len(readable), TOGETHER)]
        begun = [scorer.scores("values", params, part, TOGETHER) for part in parts]

        def ended() -> list[Judged]:
            scores = (float(values[-1]) for part in begun for values in part)
            return [Judged(tokens if isinstance(tokens, Failure) else next(scores)) for tokens in inputs]

        return ended

    return Judge("model", 1.0, TOGETHER, begin)


def rendered(tokenizer: Tokenizer, data: DataConfig, prompt: Prompt, completion: Completion, text: str) -> np.ndarray:
    """A prompt and a completion in another model's tokens, up to and including the stop token as in its training; a
    truncated completion has not ended.

    Raises:
        UserError: the other model's chat template refuses them, or leaves nothing of the completion.
    """
    before = prompt.row.get("messages", prompt.row.get("prompt", prompt.text))
    if isinstance(before, str):
        tokens, mask = render_completion(before, text, prompt.row, tokenizer, data)
    else:
        turn = [{"role": "assistant", "content": text}]
        tokens, mask = render_completion(asked(as_messages(before)), turn, prompt.row, tokenizer, data)
    if not mask.any():
        raise UserError("nothing of the completion is left in its rendering")
    last = int(np.flatnonzero(mask)[-1])
    unfinished = completion.finish == "length" and int(tokens[last]) in tokenizer.stop_ids
    return tokens[: last + (not unfinished)]
