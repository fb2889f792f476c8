"""The head that drafts the token after the next one: multi-token prediction (MTP).

DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2), with the weights and the order of Qwen 3.5
(https://huggingface.co/Qwen, vLLM's `qwen3_5_mtp.py`): the embedding of token t + 1 and the backbone's state after
token t, each normed, are joined in this order, projected to the model's width, and go through one layer of full
attention and a final norm. The backbone's head makes logits of token t + 2 of the result. The state is that after the
backbone's final norm; the head's own result stands in for it where a further token is drafted.

Axes: B rows, C tokens at a time, D model width, Dm twice the model width.
"""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tunix.models.attention.inputs import Segments
from tunix.models.attention.pages import CachedView, Pages
from tunix.models.blocks import Block, Cache
from tunix.models.config import DecoderConfig
from tunix.models.layers import Norm, Projection, RopeTables


class DraftHead(nnx.Module):
    """The weights of the head; the table of embeddings and that of logits are the model's."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        norm = partial(Norm, config.d_model, "embed", eps=config.norm_eps, offset=config.norm_offset)
        shape = (2 * config.d_model, config.d_model)
        self.embed_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
        self.join = Projection("BTM,MD->BTD", shape, (None, "embed"), rngs, contracted=1)
        self.layer = Block(config, config.mixer, rngs)

    def __call__(
        self,
        embedded: Float[Array, "B C D"],
        hidden: Float[Array, "B C D"],
        rope: RopeTables,
        view: Segments | CachedView,
        cache: Pages | None = None,
    ) -> tuple[Float[Array, "B C D"], Cache | None]:
        """States from which the tokens after the embedded ones are drafted, and the pages with these, where there are
        some.

        Args:
            embedded: token t + 1 of each place t.
            hidden: the backbone's state after token t, or what this has returned for token t.
            rope: cos and sin of the places t.
            view: where the places t are written and what they see.
        """
        joined = self.join(jnp.concatenate([self.embed_norm(embedded), self.hidden_norm(hidden)], axis=-1))
        x, pages, _ = self.layer(joined, rope, view, cache)
        return self.norm(x), pages
