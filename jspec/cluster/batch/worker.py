"""Workers that complete prompts, each with its own engine."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jspec.cluster.batch.batch_job import Part
from jspec.cluster.batch.completed import Completed
from jspec.core.detokenizer import pieces
from jspec.core.sampling import SamplingParams
from jspec.core.tokenizer import Tokenizer
from jspec.core.types import check_count
from jspec.engine import Engine, Request, Result
from jspec.generation.complete import Task, prepare, stop_strings, truncate_at_stop
from jspec.models.sampling_defaults import recommended
from jspec.text import keys_of_requests
from jspec.text.chat_template import Prompt, is_conversation
from jspec.text.template_variables import check_variables


@dataclasses.dataclass(frozen=True)
class Decoding:
    """The settings that determine the completions of a job.

    Attributes:
        max_new_tokens: the maximum number of new tokens for each prompt.
        seed: the random seed. A prompt's key depends on it and on the prompt's index.
        sampling, stop, template: as in `jspec.complete`.

    Raises:
        ValueError: a value is invalid.
    """

    max_new_tokens: int
    seed: int
    sampling: SamplingParams | None = None
    stop: tuple[str, ...] = ()
    template: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens)
        keys_of_requests(self.seed, [0])  # raises ValueError if the seed is invalid
        stop_strings(self.stop)
        check_variables("template", self.template)


class Worker:
    """A worker that completes prompts with its own engine.

    Args:
        engine: an engine that is not running. The worker starts it.
        tokenizer: the target's tokenizer.
        decoding: the settings of the completions.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, decoding: Decoding):
        self._engine, self._tokenizer, self._decoding = engine.__enter__(), tokenizer, decoding

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def decode(self, parts: Sequence[Part]) -> Iterator[tuple[int, list[Completed]]]:
        """Yield each part's number and completions."""
        for part in parts:
            yield part.number, self.complete(part.indices, part.prompts)

    def complete(self, indices: Sequence[int], prompts: Sequence[Prompt]) -> list[Completed]:
        """Return the completion of each prompt.

        In float32, each equals that of `jspec.complete` with ``accept="coupled"``.

        Args:
            indices: the index of each prompt in the input.

        Raises:
            ValueError: a prompt is invalid, or the engine cannot decode it.
        """
        decoding, target = self._decoding, self._engine.target
        template = decoding.template if any(map(is_conversation, prompts)) else None
        task = prepare(self._tokenizer, list(prompts), decoding.stop, template)
        sampling, ends = decoding.sampling or recommended(target), task.ends(target)
        requests = [
            Request(ids, decoding.max_new_tokens, sampling, key, ends)
            for key, ids in zip(keys_of_requests(decoding.seed, indices), task.rows, strict=True)
        ]
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].tokens))  # long prompts first
        results = dict(zip(order, self._engine.generate(requests[i] for i in order), strict=True))
        return [self._completed(task, requests[row], results[row], index) for row, index in enumerate(indices)]

    def _completed(self, task: Task, request: Request, result: Result, index: int) -> Completed:
        if result.error is not None:
            raise ValueError(f"Prompt {index} (counted from 0) cannot be decoded: {result.error}")
        added = pieces(self._tokenizer, request.tokens, result.tokens)
        kept = truncate_at_stop(added, task.stop)
        text = added if kept is None else kept
        return {
            "prompt_index": index,
            "generated_text": "".join(text),
            "generated_tokens": result.tokens[: len(text)],
            "finish_reason": task.reason(self._engine.target, kept, result.tokens[-1]),
        }
