"""The adapter for drafters that do not derive from `Drafter`. No other code checks for missing attributes."""

from collections.abc import Callable
from typing import Protocol, cast

from jax import Array

from jspec.core.types import Adapter, Draft, PyTree, Verdict, pytree
from jspec.drafters.base import Context, Drafter, DrafterLike, is_stateless_init
from jspec.drafters.signals import NO_SIGNALS, PromptSignals, TargetSignals, taking_signals


class _Reader(Protocol):
    """A drafter that can prefill a sequence in pieces."""

    @property
    def read(self) -> Callable[..., PyTree]: ...


@pytree
class DuckDrafter(Drafter[PyTree], Adapter):
    """An adapter with the attributes and methods of `draft`, and with the defaults of `Drafter` for missing ones."""

    draft: DrafterLike

    @property
    def original(self) -> object:
        return self.draft

    @property
    def vocab_size(self) -> int | None:
        return self.draft.vocab_size

    @property
    def parts(self) -> tuple[Drafter[PyTree], ...]:
        return tuple(map(adapted, getattr(self.draft, "parts", ())))

    @property
    def needs_prefill(self) -> bool:
        return not is_stateless_init(getattr(type(self.draft), "init", None))

    @property
    def can_read(self) -> bool:
        return hasattr(self.draft, "read")

    def init(self, tokens: Array, num_slots: int, signals: PromptSignals = NO_SIGNALS) -> PyTree:
        return taking_signals(self.draft.init, "init")(tokens, num_slots, signals)

    def read(self, state: PyTree, tokens: Array, start: Array, count: Array, signals: PromptSignals) -> PyTree:
        return taking_signals(cast(_Reader, self.draft).read, "read")(state, tokens, start, count, signals)

    def propose(self, state: PyTree, context: Context, num_draft_tokens: int) -> tuple[Draft, PyTree]:
        return self.draft.propose(state, context, num_draft_tokens)

    def commit(self, state: PyTree, draft: Draft, verdict: Verdict, signals: TargetSignals) -> PyTree:
        return taking_signals(self.draft.commit, "commit")(state, draft, verdict, signals)


def adapted(draft: object) -> Drafter[PyTree]:
    """Return `draft` as a `Drafter`. Return an object without `propose` unchanged, because validation rejects it."""
    if isinstance(draft, Drafter) or not hasattr(draft, "propose"):
        return cast(Drafter[PyTree], draft)
    return DuckDrafter(cast(DrafterLike, draft))
