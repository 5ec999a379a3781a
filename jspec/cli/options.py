"""The options of `jspec generate`, each as a type, and parsers that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from jspec.cli.common import option


def one_of(*names: str) -> Callable[[str], str]:
    """Return a parser that accepts only these names."""

    def parse(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(names)}.")
        return text

    return parse


def choice(names: str, text: str, *allowed: str) -> object:
    """Return an option that takes one of the `allowed` values."""
    return option(names, "|".join(allowed), text, parser=one_of(*allowed))


def length(text: str) -> int | str:
    """Parse a number of draft tokens, or "auto"."""
    if text == "auto" or (text.isdecimal() and 1 <= int(text) < 2**31):
        return text if text == "auto" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a whole number of at least 1 nor auto.")


def _tree(text: str) -> tuple[int, ...]:
    """Parse the parents of a tree's nodes, such as "0,0,1"."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) <= node for node, part in enumerate(parts)):
        raise typer.BadParameter(
            f"{text!r} is not a tree; list the parent of each node, which must come before the node, such as "
            "0,0,1, where 0 is the last token of the text."
        )
    return tuple(map(int, parts))


Prompts = Annotated[list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue.", show_default=False)]
File = Annotated[
    Path | None,
    option("--file", "JSONL", 'Lines of {"prompt": TEXT} or {"messages": [...]}.', exists=True, dir_okay=False),
]
Chat = Annotated[bool, option("--chat", None, "Answer each PROMPT as a message to a chat model.")]
System = Annotated[str | None, option("--system", "TEXT", "With --chat: system message, placed first.")]
Stop = Annotated[
    list[str] | None,
    option("--stop", "TEXT", "Cut the output before TEXT; decoding continues. May be repeated.", show_default=False),
]
Target = Annotated[
    str | None,
    option(
        "--target", "SRC", "Path, model name, Hugging Face repo id or org/repo:file.gguf [default: the bundled target]."
    ),
]
TargetArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="TARGET",
        help="Path, model name, Hugging Face repo id or org/repo:file.gguf [default: the bundled target].",
    ),
]
Tokenizer = Annotated[
    str | None,
    option(
        "--tokenizer",
        "SRC",
        "Model that provides the tokenizer and chat template of target and draft [default: target].",
    ),
]
Draft = Annotated[
    str | None,
    option(
        "--draft",
        "SRC",
        "Smaller model with the same tokenizer; datastore; lookup (prompt lookup); exit:N (the target's first N layers)"
        " or exit:N-I (those layers without layer I); a trained head's folder or repo id; head (the bundled head, for"
        " smollm2); lookup+SRC (SRC if prompt lookup finds no draft); or none [default: lookup+head for smollm2, lookup"
        " for other named targets].",
    ),
]
Plain = Annotated[bool, option("--plain", None, "Decode without a draft, like --draft none.")]
_DTYPES = ("float32", "bfloat16", "float16")
Dtype = Annotated[
    str | None,
    choice("--dtype", "Dtype of weights and computation [default: float32 on CPU, else bfloat16].", *_DTYPES),
]
ActivationBits = Annotated[
    str,
    choice(
        "--activation-bits",
        "Number of bits to which activations are rounded before they multiply packed weights. 8 makes verification "
        "fastest [default: 24].",
        "8",
        "16",
        "24",
    ),
]
Quantize = Annotated[
    str | None,
    choice(
        "--quantize",
        "Quantise the weights of target and draft model. See --draft-quantize for trained heads.",
        "int8",
        "int4",
    ),
]
DraftQuantize = Annotated[
    str | None,
    choice(
        "--draft-quantize",
        "Quantise the draft. This does not change the output's distribution [default: for draft models, the value of "
        "--quantize; for EAGLE heads and block drafters, int8 if the target is packed in a quantised format].",
        "int8",
        "int4",
        "none",
    ),
]
# Without a value, these options use the model's own default from its generation_config.json.
_OWN_OR_0, _OWN_OR_1 = "the model's own, else 0", "the model's own, else 1"
Temperature = Annotated[float | None, option("--temperature", "X", "0 is greedy.", min=0, show_default=_OWN_OR_1)]
TopK = Annotated[
    int | None,
    option("--top-k", "N", "Keep the N most likely tokens; 0 is off.", min=0, show_default=_OWN_OR_0),
]
TopP = Annotated[
    float | None,
    option(
        "--top-p",
        "X",
        "Keep the most likely tokens with a total probability of X; 1 is off.",
        min=0,
        max=1,
        show_default=_OWN_OR_1,
    ),
]
MinP = Annotated[
    float | None,
    option(
        "--min-p",
        "X",
        "Drop tokens less than X times as likely as the top token; 0 is off.",
        min=0,
        max=1,
        show_default=_OWN_OR_0,
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    option(
        "--repetition-penalty",
        "X",
        "Penalise tokens that have already occurred; 1 is off.",
        min=1e-3,
        max=1e3,
        show_default=_OWN_OR_1,
    ),
]
Template = Annotated[
    list[str] | None,
    option(
        "--template",
        "NAME=VALUE",
        "Set a variable of the chat template; the value is JSON, or else text. May be repeated.",
        show_default=False,
    ),
]
Seed = Annotated[int, option("--seed", "N", "Random seed; the same seed produces the same text.", min=0, max=2**32 - 1)]
MaxNewTokens = Annotated[
    int, option("--max-new-tokens -n", "N", "Maximum number of new tokens per prompt.", min=1, max=2**31 - 1)
]
NumDraftTokens = Annotated[
    Any,
    option(
        "--num-draft-tokens",
        "N",
        "Draft tokens per round (a maximum with lookup or a datastore); auto: measure first, for a minute or more.",
        parser=length,
        show_default="4",
    ),
]
AutoDraftTokens = Annotated[
    Any,
    option(
        "--num-draft-tokens",
        "N",
        "Draft tokens per round; auto: as many as pay off at the current load.",
        parser=length,
        show_default="auto",
    ),
]
Tree = Annotated[
    Any,
    option(
        "--tree",
        "PARENTS",
        "Draft a tree, given as a list of each node's parent, such as 0,0,1; see jspec tune.",
        parser=_tree,
    ),
]
_RULES = ("rejection", "block", "coupled", "traversal")
Accept = Annotated[
    str | None,
    choice("--accept", "Acceptance rule; each keeps the target's distribution [default: rejection].", *_RULES),
]
Show = Annotated[bool, option("--show", None, "Show the rounds, one per line, with the rejected draft tokens.")]
Json = Annotated[bool, option("--json", None, "Print one JSON object per line.")]
