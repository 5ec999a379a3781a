"""How weights lie in a device's memory, where that is not as usual."""

import jax
from jax.experimental.layout import Format, Layout

from jspec.models.llama import Llama

# Of an embedding, ``[E, V]``, on a TPU: a token's numbers side by side. In the usual layout every call would begin with
# a copy of it into this one.
BY_TOKEN = Layout(major_to_minor=(1, 0))


def lay_out(model: Llama) -> None:
    """Put the weights of `model`, where they are, into the layouts in which programs read them."""
    if jax.default_backend() == "tpu":
        embedding = model.embed_tokens.weight
        embedding.set_value(jax.device_put(embedding[...], Format(BY_TOKEN, embedding[...].sharding)))
