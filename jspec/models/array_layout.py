"""The memory layouts of weights that differ from the default layout of a device."""

import jax
from jax.experimental.layout import Format, Layout

from jspec.models.llama import Llama

# The layout of an embedding, ``[E, V]``, on a TPU: a token's numbers are side by side. With the default layout, every
# call would begin with a copy into this one.
BY_TOKEN = Layout(major_to_minor=(1, 0))


def lay_out(model: Llama) -> None:
    """Convert the weights of `model`, on their devices, to the layouts in which programs read them."""
    if jax.default_backend() == "tpu":
        embedding = model.embed_tokens.weight
        embedding.set_value(jax.device_put(embedding[...], Format(BY_TOKEN, embedding[...].sharding)))
