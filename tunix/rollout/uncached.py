"""Sampling without a cache: a whole forward pass for each token, in one compiled loop.

For a handful of samples of a small model, where a cache's machinery is not worth its while. A draw depends on
(seed, request, token index) alone.

Axes: B requests, T time, V vocabulary.
"""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from tunix.models.model import Model, Params
from tunix.types import Completion, Sampling


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[np.ndarray],
    n: int,
    sampling: Sampling,
    seed: int,
    version: int = 0,
) -> list[list[Completion]]:
    """`n` completions for each prompt.

    Args:
        prompts: token ids, at least one each.
        seed: of the draws; request i is prompt i // n, sample i % n.
        version: of the weights, noted in the completions.
    """
    requests = [prompt for prompt in prompts for _ in range(n)]
    lengths = np.array([len(prompt) for prompt in requests], np.int32)
    # Powers of two keep the number of compiled shapes small.
    width = 1 << int(lengths.max() + sampling.max_tokens - 1).bit_length()
    tokens = np.zeros((len(requests), width), np.int32)
    for row, prompt in zip(tokens, requests, strict=True):
        row[: len(prompt)] = prompt
    tokens, logprobs, ends = jax.device_get(_generate(model, sampling, params, tokens, lengths, jax.random.key(seed)))
    stops = np.array(sampling.stop_ids)

    def completion(row: int) -> Completion:
        mine = slice(lengths[row], ends[row])
        stopped = bool(np.isin(tokens[row, ends[row] - 1], stops))
        finish = "stop" if stopped else "length"
        turns = ((0, int(ends[row] - lengths[row])),)
        return Completion(tokens[row, mine], logprobs[row, mine], finish, version, sampling, turns)

    done = [completion(row) for row in range(len(requests))]
    return [done[i : i + n] for i in range(0, len(done), n)]


@partial(jax.jit, static_argnums=(0, 1))
def _generate(
    model: Model,
    sampling: Sampling,
    params: Params,
    tokens: Int[Array, "B T"],
    lengths: Int[Array, "B"],
    key: PRNGKeyArray,
) -> tuple[Int[Array, "B T"], Float[Array, "B T"], Int[Array, "B"]]:
    """Filled tokens, the drawn ones' log-probs, and where each row ends."""
    rows, width = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(width), (rows, width))
    keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))
    stops = jnp.array(sampling.stop_ids or (-1,))

    def unfinished(carry: tuple) -> jax.Array:
        _, _, _, done, drawn = carry
        return (drawn < sampling.max_tokens) & ~jnp.all(done)

    def draw(carry: tuple) -> tuple:
        tokens, logprobs, ends, done, drawn = carry
        hidden = model.hidden(params, tokens, positions, jnp.ones_like(tokens))
        last = jnp.take_along_axis(hidden, (ends - 1)[:, None, None], axis=1)
        log_p = jax.nn.log_softmax(model.logits(params, last)[:, 0] / (sampling.temperature or 1.0))
        if sampling.temperature == 0:
            taken = jnp.argmax(log_p, axis=-1)
        else:
            taken = jax.vmap(lambda k, p: jax.random.categorical(jax.random.fold_in(k, drawn), p))(keys, log_p)
        here = (jnp.arange(width) == ends[:, None]) & ~done[:, None]
        tokens = jnp.where(here, taken[:, None].astype(tokens.dtype), tokens)
        logprobs = jnp.where(here, jnp.take_along_axis(log_p, taken[:, None], axis=1), logprobs)
        return tokens, logprobs, ends + ~done, done | jnp.isin(taken, stops), drawn + 1

    start = (tokens, jnp.zeros(tokens.shape, jnp.float32), lengths, jnp.zeros(rows, bool), jnp.int32(0))
    tokens, logprobs, ends, _, _ = jax.lax.while_loop(unfinished, draw, start)
    return tokens, logprobs, ends
