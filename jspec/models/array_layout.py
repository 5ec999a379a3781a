"""Memory layouts for weights that should not have a device's default layout."""

import jax
from jax.experimental.layout import Format, Layout

from jspec.models.llama import Llama

# The layout of an embedding ``[E, V]`` on a TPU, with each token's values contiguous. With the default layout, every
# call would start with a copy into this layout.
BY_TOKEN = Layout(major_to_minor=(1, 0))


def lay_out(model: Llama) -> None:
    """Convert the weights of `model` on their devices to the layouts that programs read them in."""
    if jax.default_backend() == "tpu" and model.embed_tokens.parts is None:
        embedding = model.embed_tokens.weight
        embedding.set_value(jax.device_put(embedding[...], Format(BY_TOKEN, embedding[...].sharding)))
