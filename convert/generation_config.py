"""generation_config.json: the sampling parameters that a model recommends."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

from convert.errors import CheckpointError
from convert.json_fields import Fields, flag
from convert.json_file import Json

NAME = "generation_config.json"
# Name -> (description of the allowed values, predicate that tests a value).
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number of at least 0 (0 is greedy)", lambda x: 0 <= x < math.inf),
    "top_k": ("a whole number of at least -1 (0 and -1 are off)", lambda x: -1 <= x < 2**31 and x == int(x)),
    "top_p": ("a number above 0 and at most 1 (1 is off)", lambda x: 0 < x <= 1),
    "min_p": ("a number from 0 (off) to 1", lambda x: 0 <= x <= 1),
    "repetition_penalty": ("a number from 0.001 to 1000 (1 is off)", lambda x: 1e-3 <= x <= 1e3),
    "presence_penalty": ("a number from -1e6 to 1e6 (0 is off)", lambda x: abs(x) <= 1e6),
    "frequency_penalty": ("a number from -1e6 to 1e6 (0 is off)", lambda x: abs(x) <= 1e6),
}
# Other fields that change the distribution, with the value that disables each. The last line is for GGUF files.
_UNSUPPORTED: Fields = {
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty", "top_h"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length", "min_new_tokens"), 0),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens")),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")),
    **dict.fromkeys(("dola_layers", "watermarking_config", "force_words_ids", "constraints")),
    **{"sequence": None, "xtc_probability": 0, "mirostat": 0, "penalty_last_n": -1},
}


@dataclasses.dataclass(frozen=True)
class SamplingDefaults:
    """The sampling parameters that a model recommends. A field is None if the model does not recommend a value.

    Attributes:
        temperature: 0 if the file says ``"do_sample": false``. See `jspec.SamplingParams` for this and the other
            fields.
        unsupported: the names of other fields that would change the distribution. These fields are ignored.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    unsupported: tuple[str, ...] = ()

    def values(self) -> dict[str, float]:
        """Return the recommended values by name."""
        given = dataclasses.asdict(self)
        return {name: given[name] for name in _RANGES if given[name] is not None}

    def fields(self) -> Fields:
        """Return the content of a generation_config.json with the same recommendations, or {} if there are none."""
        values = cast("Fields", self.values())
        return values and values | {"do_sample": self.temperature != 0}


def parse_sampling(raw: Fields) -> SamplingDefaults:
    """Parse the content of a generation_config.json, or of config.json if the model has no such file.

    As in vLLM, a field applies whether or not the file says ``"do_sample": true``. A missing field sets no
    default: without `top_k`, for example, top-k is off, whereas transformers would use 50.

    Raises:
        CheckpointError: a sampling parameter is out of range. The message names the parameter.
    """
    values: dict[str, Any] = {  # arguments of SamplingDefaults
        name: _value(name, raw[name]) for name in _RANGES if raw.get(name) is not None
    }
    if not flag(raw, "do_sample", default=True):
        values["temperature"] = 0.0
    ignored = (name for name, off in _UNSUPPORTED.items() if raw.get(name) not in (None, [], {}, off))
    return SamplingDefaults(**values, unsupported=tuple(ignored))


def _value(name: str, value: Json) -> float:
    allowed, test = _RANGES[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and test(value)):
        raise CheckpointError(f"{name} is {value!r}; expected {allowed}: correct the file, or delete the field.")
    return max(0, int(value)) if name == "top_k" else float(value)
