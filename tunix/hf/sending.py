"""Sends a folder's tensors from the devices to the host, some time before they are written, in the layout of a file."""

from collections.abc import Callable

import jax
import numpy as np

from tunix.distributed.global_arrays import everywhere
from tunix.hf.safetensors_io import Sent
from tunix.hf.tensor_loading import Place
from tunix.models.families.base import Tensor
from tunix.models.quantization.formats import Quantization, quantize
from tunix.models.quantization.schemes import Packing
from tunix.util.exact import jit


def sent(array: jax.Array, place: Place, write: Callable[[np.ndarray], np.ndarray], dtype: str) -> Sent:
    """Sends one tensor of a stack to the host.

    Args:
        array: the stack, or a table.
        place: index of the tensor in it.
        write: lays it out as in a file.
        dtype: in which it is sent.
    """
    there = everywhere(_taken(array, place).astype(dtype))
    there.copy_to_host_async()
    return lambda: write(np.asarray(there))


def sent_values(array: jax.Array, place: Place, tensor: Tensor, how: Packing) -> Sent:
    """Sends the rounded values of a layer's matrix."""
    values = everywhere(_rounded(array, place, tensor, how)[0])
    values.copy_to_host_async()
    return lambda: tensor.write(np.asarray(values))


def sent_scales(array: jax.Array, place: Place, tensor: Tensor, how: Packing) -> Sent:
    """Sends the scales of a layer's rounded matrix."""
    scales = everywhere(_rounded(array, place, tensor, how)[1])
    scales.copy_to_host_async()
    runs = tensor.order_of_runs(array.shape[len(place) :])

    def there() -> np.ndarray:
        outputs = np.asarray(scales).reshape(len(scales), -1).T
        return outputs if runs is None else outputs.take(runs, axis=0)

    return there


def _rounded(array: jax.Array, place: Place, tensor: Tensor, how: Packing) -> tuple[jax.Array, jax.Array]:
    """Values and scales of a layer's matrix."""
    assert how.rule.weights is not None
    rounding = Quantization(how.rule.weights, how.tile)
    return jit(quantize, static_argnums=(1, 2))(_taken(array, place), rounding, tensor.contracted)


def _taken(array: jax.Array, place: Place) -> jax.Array:
    for index in place:
        array = jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False)
    return array
