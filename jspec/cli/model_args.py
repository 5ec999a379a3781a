"""The sources of a command's models, and the choice of its draft."""

import dataclasses
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from jspec.bundled import PAIR
from jspec.bundled.head_data import head_of
from jspec.cli.common import UsageError

if TYPE_CHECKING:
    from typing import Protocol

    from jspec.drafters import EarlyExitDrafter
    from jspec.drafters.base import DraftSource
    from jspec.models.llama import Llama
    from jspec.text.tokenizer_file import TokenizerFile

    class Trained(Protocol):
        """A drafter class whose instances are trained and saved."""

        def load(self, path: str | Path, target: Llama, dtype: str | None = None, /) -> DraftSource: ...


STORE = ".safetensors"  # the suffix of datastores; models do not have it
NONE, LOOKUP, HEAD, EXIT = "none", "lookup", "head", "exit"
BESIDE = f"{LOOKUP}+"
_EXIT = re.compile(r"exit:([1-9]\d*)((?:-\d+)*)")
BUNDLED_TARGET, PAIR_DRAFT = str(PAIR / "target"), str(PAIR / "draft")
_TREES = "pass", "several"  # head kinds that are trained for one tree
_QUANTIZABLE = None, "eagle", "block"  # head kinds that can be quantised; None stands for a model


class Precision(NamedTuple):
    """The precision of target and draft. See `jspec.load`.

    `draft_quantize` applies to the draft, and `quantize` to the target and, by default, to a draft model. If
    `draft_quantize` is "none", the draft keeps the weights of its file.
    """

    dtype: str | None = None
    quantize: str | None = None
    activation_bits: int = 24
    draft_quantize: str | None = None


@dataclasses.dataclass(frozen=True)
class Sources:
    """The models to load.

    Attributes:
        target: a model's path, name or Hugging Face repo id.
        draft: a model's path, name or Hugging Face repo id, a trained head's directory or repo id, a datastore,
            "lookup", "exit:N", "exit:N-I-J" or "none". `jspec tune` also accepts "exit".
        looks_up: whether `draft` drafts only if prompt lookup finds no draft.
        tokenizer_source: the checkpoint that provides the models' tokenizer; None for the target.
    """

    target: str
    draft: str
    looks_up: bool = False
    tokenizer_source: str | None = None

    @property
    def name(self) -> str:
        """The value of --draft for this draft."""
        return f"{BESIDE}{self.draft}" if self.looks_up else self.draft

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return self.draft != NONE

    @property
    def can_branch(self) -> bool:
        """Whether the draft may be a tree of any shape."""
        return self.draft not in (NONE, LOOKUP) and not self.looks_up and not self.has_tree

    @property
    def has_tree(self) -> bool:
        """Whether the draft is trained for one tree: look-ahead vectors, or several models."""
        return self.head_kind in _TREES

    @functools.cached_property
    def head_kind(self) -> str | None:
        """The kind of trained drafter that `draft` is, or None.

        A draft on the Hugging Face Hub is downloaded to determine its kind.

        Raises:
            convert.CheckpointError: the download failed.
        """
        from convert import source

        if is_model(self.draft) and source.is_repo_id(self.draft):
            return head_kind(str(source.resolve(self.draft)))
        return head_kind(self.draft)

    def tokenizer(self) -> "TokenizerFile":
        """Return the tokenizer that the target and the draft share.

        Raises:
            UsageError: the tokenizer of `tokenizer_source` has more tokens than the target's vocabulary.
        """
        from convert import loading
        from jspec import text

        loading.check(self.target)
        tokenizer = text.load_tokenizer(self.tokenizer_source or self.target)
        if self.tokenizer_source is not None:
            self._check_vocabulary(len(tokenizer))
        if is_model(self.draft) and self.head_kind is None and self.tokenizer_source is None:
            text.check_same_tokenizer(tokenizer, text.load_tokenizer(self.draft))
        return tokenizer

    def precision(
        self, dtype: str | None, quantize: str | None, draft_quantize: str | None, activation_bits: str
    ) -> Precision:
        """Return the precision that the options select.

        Raises:
            UsageError: `draft_quantize` is set, but the draft cannot be quantised.
        """
        if draft_quantize is not None and not (is_model(self.draft) and self.head_kind in _QUANTIZABLE):
            raise UsageError(
                f"--draft-quantize needs a draft model, an EAGLE head or a block drafter, but {self.name} is none of "
                "these; leave out --draft-quantize."
            )
        return Precision(dtype, quantize, int(activation_bits), draft_quantize)

    def load(self, precision: Precision = Precision()) -> "tuple[Llama, DraftSource | None]":  # noqa: B008
        """Return the target and its drafter, if any.

        Trained heads other than EAGLE heads and block drafters are not quantised.
        """
        from jspec import load
        from jspec.drafters.combine.fallback import with_lookup_first
        from jspec.drafters.heads.quantized_heads import quantize_for

        drafter = without_model(self.draft)  # quick checks come first
        if _EXIT.fullmatch(self.draft):
            self._check_layers()
        dtype, quantize, bits, draft_quantize = precision
        target = load(self.target, dtype, quantize, activation_bits=bits)
        if kind := self.head_kind:
            drafter = drafter_class(kind).load(self.draft, target, dtype)
            drafter = drafter if draft_quantize == NONE else quantize_for(target, drafter, draft_quantize)
        elif is_model(self.draft):
            kind = None if draft_quantize == NONE else draft_quantize or quantize
            drafter = load(self.draft, dtype, kind, activation_bits=bits)
        return target, with_lookup_first(cast("DraftSource", drafter)) if self.looks_up else drafter

    def _check_vocabulary(self, size: int) -> None:
        import convert

        known = convert.read_config(convert.resolve(self.target)).vocab_size
        if size > known:
            raise UsageError(
                f"--tokenizer {self.tokenizer_source} has {size} tokens, but the target has only {known}; use the "
                "tokenizer of the same model."
            )

    def _check_layers(self) -> None:
        import convert

        check_exit(self.draft, convert.read_config(convert.resolve(self.target)).num_hidden_layers)


def without_model(draft: str) -> "DraftSource | None":
    """Return the drafter named `draft` if it needs no model. Return None for "none" and for an unspecified "exit"."""
    from jspec import EarlyExitDrafter, NGramDrafter, RetrievalDrafter

    if draft.endswith(STORE):
        return RetrievalDrafter.load(draft)
    if _EXIT.fullmatch(draft):
        return EarlyExitDrafter(*_exit(draft))
    return NGramDrafter() if draft == LOOKUP else None


def check_exit(draft: str, layers: int) -> None:
    """Raise UsageError if "exit:N" skips none of the target's `layers` layers, or needs more layers than that."""
    wanted, skipped = _exit(draft)
    if wanted > layers or (wanted == layers and not skipped):
        raise UsageError(f"--draft {draft} leaves out none of the target's {layers} layers; choose an earlier exit.")


def _exit(draft: str) -> tuple[int, tuple[int, ...]]:
    """Return ``(5, (1, 3))`` for "exit:5-1-3": the first 5 layers without layers 1 and 3, counted from 0.

    Raises:
        UsageError: `draft` is not an exit, or it skips a layer twice, skips a layer that is not before the exit, or
            keeps no layer.
    """
    found = _EXIT.fullmatch(draft)
    if not found:
        raise UsageError(
            f"--draft {draft} is not an exit; write exit:N for the target's first N layers, or exit:N-I-J for "
            "those without layers I and J, counted from 0."
        )
    layers, skipped = int(found[1]), tuple(map(int, found[2].split("-")[1:]))
    if len({*skipped}) < len(skipped) or max(skipped, default=0) >= layers or len(skipped) == layers:
        raise UsageError(
            f"--draft {draft} must skip each layer at most once, skip only layers 0 to {layers - 1}, and "
            "keep at least one."
        )
    return layers, skipped


def exit_name(drafter: "EarlyExitDrafter") -> str:
    """Return the value of --draft for an `EarlyExitDrafter`."""
    return f"exit:{'-'.join(map(str, (drafter.num_layers, *drafter.skipped)))}"


def sources(
    target: str | None,
    draft: str | None,
    plain: bool = False,
    tokenizer_source: str | None = None,
    may_search: bool = False,
) -> Sources:
    """Return the models selected by the options.

    The default is the bundled pair. If only a target is named, the draft is prompt lookup. If the target has a
    trained head, that head drafts whenever prompt lookup finds no draft.

    Args:
        tokenizer_source: the checkpoint that provides the models' tokenizer.
        may_search: whether the draft may be "exit", for which the layers have yet to be chosen.

    Raises:
        UsageError: the options cannot be combined, or the draft is invalid.
        FileNotFoundError: there is no such datastore.
    """
    if plain and draft not in (None, NONE):
        raise UsageError("--plain decodes without a draft; leave out --draft.")
    if tokenizer_source is not None and target is None:
        raise UsageError("--tokenizer needs a target, because the bundled one has its own tokenizer; name a target.")
    draft = NONE if plain else _usual(target) if draft is None else draft
    looks_up = draft.startswith(BESIDE)
    draft = draft.removeprefix(BESIDE)
    if looks_up and (draft in ("", NONE, LOOKUP, EXIT) or head_kind(draft) in _TREES):
        raise UsageError(
            "--draft lookup+SRC needs an SRC that drafts a chain if prompt lookup finds no draft: a model, a trained "
            f"head, a datastore or exit:N; {draft or 'nothing'} does not."
        )
    if draft == HEAD and not Path(HEAD).exists():  # a path takes precedence, as it does for targets
        draft = _head(target)
    if (Path(draft) / "recipe.json").is_file() and (trained := Path(draft) / "drafter").is_dir():
        raise UsageError(f"{draft} is the folder of a training run; use its drafter, --draft {trained}.")
    _check_found(draft, may_search)
    if is_model(draft) and not target and draft != PAIR_DRAFT and head_kind(draft) is None:
        raise UsageError(f"The draft {draft!r} is a model, which needs a target; name its target, too.")
    if draft.startswith("exit:"):
        _exit(draft)
    if draft == EXIT and not may_search:
        raise UsageError(
            "--draft exit works only with jspec tune, which finds the layers; write exit:N, as jspec tune prints it."
        )
    if draft.endswith(STORE) and not Path(draft).is_file():
        raise FileNotFoundError(f"{draft} does not exist; build a datastore with jspec index.")
    return Sources(target or BUNDLED_TARGET, draft, looks_up, tokenizer_source)


def _check_found(draft: str, may_search: bool) -> None:
    """Raise UsageError if the draft is an unknown word. This check does not need the target."""
    from convert import hub_names as names

    is_word = is_model(draft) and "/" not in draft
    if is_word and draft not in names.MODELS and not Path(draft).exists():
        words = NONE, LOOKUP, HEAD, EXIT if may_search else f"{EXIT}:N"
        raise UsageError(f"The draft {names.unknown(draft, *words)}")


def _usual(target: str | None) -> str:
    """Return the default draft for a target."""
    if target is None:
        return PAIR_DRAFT
    folder = head_of(target)
    return LOOKUP if folder is None else f"{BESIDE}{folder}"


def _head(target: str | None) -> str:
    """Return the folder of the bundled head for `target`.

    Raises:
        UsageError: there is no such head.
    """
    folder = None if target is None else head_of(target)
    if folder is None:
        raise UsageError(
            "--draft head requires a target with a bundled head, such as smollm2; for other targets, pass the path of "
            "the head's folder."
        )
    return str(folder)


def is_model(draft: str) -> bool:
    """Return whether `draft` names a model, rather than another kind of drafter."""
    draft = draft.removeprefix(BESIDE)
    return draft not in (NONE, LOOKUP, EXIT) and not draft.startswith("exit:") and not draft.endswith(STORE)


def drafter_class(kind: str) -> "Trained":
    """Return the drafter class for `kind`, a name that `jspec.train_drafter` and config.json use.

    Raises:
        UsageError: there is no such kind.
    """
    import jspec

    classes = {
        "block": jspec.BlockDrafter,
        "eagle": jspec.EagleDrafter,
        "medusa": jspec.MedusaDrafter,
        "hydra": jspec.HydraDrafter,
        "blockwise": jspec.BlockwiseDrafter,
        "kangaroo": jspec.KangarooDrafter,
        "pass": jspec.PassDrafter,
        "several": jspec.MultiDrafter,
    }
    if kind not in classes:
        raise UsageError(f"--draft holds a drafter of kind {kind!r}; expected one of {', '.join(classes)}.")
    return classes[kind]


def head_kind(draft: str) -> str | None:
    """Return the kind of trained drafter in the directory `draft`, or None if it holds none. Download nothing."""
    from convert.heads import files as head_files

    return head_files.kind_of(Path(draft)) if is_model(draft) and Path(draft).is_dir() else None
