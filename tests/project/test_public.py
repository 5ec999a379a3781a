"""The public names, the import order of packages, and the size limits that keep files readable."""

import ast
import graphlib
import importlib.util
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import convert
import jspec
from convert import moved

ROOT = Path(jspec.__file__).parent
# Each package imports only from those before it. Any file may use any part of `convert`.
ROOMS = [
    *("core", "text", "theory", "models", "acceptance", "rules", "planning", "drafters", "lengths"),
    *("bundled", "decoding", "tuning", "engine", "generation", "evaluation", "training", "online", "adapters"),
    *("serve", "cluster", "cli"),
]
# Functions of more than eight parameters that are neither public nor commands; add none.
WIDE = {"_kernel"}
FILES = sorted(path for package in ("jspec", "convert") for path in (ROOT.parent / package).rglob("*.py"))


def _name(path):
    """Return the module's dotted name."""
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path):
    """Yield the dotted names of everything that a file imports, including imports inside functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            whole_package = node.module in ("jspec", "convert")
            yield from (f"{node.module}.{a.name}" for a in node.names) if whole_package else [node.module]


def _modules(path, known):
    """Return the modules that a file imports, out of those that are known."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom):
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= parts & known if parts <= known else (parts | {node.module}) & known
    return imported


def _room(dotted):
    return dotted.split(".")[1]


PUBLIC_NAMES = [
    "Batches",
    "BigramDrafter",
    "BlockDrafter",
    "BlockwiseDrafter",
    "ByAcceptance",
    "ByConfidence",
    "ByEstimatedAcceptance",
    "CascadeDrafter",
    "Completion",
    "DynamicTreeDrafter",
    "EagleDrafter",
    "EarlyExitDrafter",
    "FallbackDrafter",
    "Heuristic",
    "HorizontalDrafter",
    "HydraDrafter",
    "KangarooDrafter",
    "Lenient",
    "Llama",
    "LookaheadDrafter",
    "MedusaDrafter",
    "MixtureDrafter",
    "ModelDrafter",
    "MultiDrafter",
    "NGramDrafter",
    "Output",
    "PassDrafter",
    "Plan",
    "Relaxed",
    "RetrievalDrafter",
    "Rollout",
    "SamplingParams",
    "Scores",
    "Stats",
    "Threshold",
    "TokenRecyclingDrafter",
    "TopK",
    "Tree",
    "TreeDrafter",
    "Tuning",
    "Typical",
    "UnigramDrafter",
    "UpTo",
    "WhileConfident",
    "batches",
    "best_exit",
    "complete",
    "demo_pair",
    "generate",
    "lengths",
    "load",
    "load_weights",
    "logprobs",
    "merge_lora",
    "online",
    "plan",
    "pretrained",
    "quantize",
    "rules",
    "speculative_generate",
    "stream",
    "tensor_parallel",
    "theory",
    "train_drafter",
    "tune",
]


def test_public_names_are_pinned():
    assert jspec.__all__ == PUBLIC_NAMES
    for name in jspec.__all__:
        assert inspect.getdoc(getattr(jspec, name)), f"jspec.{name} has no docstring"
    assert {"acceptance_rate", "expected_tokens", "speedup", "optimal_k", "operations"} <= set(dir(jspec.theory))
    for toolbox in (jspec.rules, jspec.lengths):
        values = [getattr(toolbox, name) for name in toolbox.__all__]
        assert all(inspect.getdoc(value) for value in values if inspect.isclass(value) or inspect.isfunction(value))
    assert {"CheckpointError", "LlamaConfig", "load", "read_config"} <= set(convert.__all__)
    assert jspec.rules.law_behind is jspec.rules.next_probs_at  # a former name


def test_public_signatures_are_pinned():
    def parameters(function):
        return [(p.name, p.kind is p.KEYWORD_ONLY) for p in inspect.signature(function).parameters.values()]

    batch = ["tokens", "lengths", "keys"]
    last = ["sampling", "eos_ids", "pad_id"]
    options = ["max_new_tokens", *last, "samples_per_prompt", "top_logprobs"]
    expected = [(n, False) for n in ["target", *batch]] + [(n, True) for n in options]
    assert parameters(jspec.generate) == expected
    options = ["max_new_tokens", "num_draft_tokens", "sampling", "accept", "eos_ids", "pad_id", "record"]
    options += ["samples_per_prompt", "top_logprobs"]
    expected = [(n, False) for n in ["target", "draft", *batch]] + [(n, True) for n in options]
    assert parameters(jspec.speculative_generate) == expected
    options = ["max_length", "num_draft_tokens", "accept", "samples_per_prompt"]
    expected = [(n, False) for n in ["target", "draft", *batch]] + [(n, True) for n in options]
    assert parameters(jspec.Rollout.start) == expected
    expected = [(n, False) for n in ["self", "target", "draft"]] + [
        (n, True) for n in ["max_new_tokens", *last, "active"]
    ]
    assert parameters(jspec.Rollout.generate) == expected
    assert parameters(jspec.Rollout.append) == [(n, False) for n in ["self", "target", "draft", "tokens", "lengths"]]
    options = ["max_new_tokens", "sampling", "max_draft_tokens", "max_nodes", "accept"]
    expected = [(n, False) for n in ["target", "draft", *batch]] + [(n, True) for n in options]
    assert parameters(jspec.tune) == expected
    options = ["device", "batch", "length", "prompt", "acceptance", "num_draft_tokens", "quantize", "num_devices"]
    assert parameters(jspec.plan) == [(n, False) for n in ["target", "draft"]] + [(n, True) for n in options]
    assert inspect.signature(jspec.quantize).parameters["kind"].default == "int8"
    options = ["dtype", "quantize", "sharding", "packed", "activation_bits"]
    assert [name for name, _ in parameters(jspec.load)] == ["source", *options]


@pytest.mark.parametrize("path", [path for path in FILES if path.is_relative_to(ROOT)], ids=_name)
def test_files_import_only_from_lower_packages(path):
    if _name(path) in ("jspec", "jspec.__main__"):
        return
    own = _room(_name(path))
    assert own in ROOMS, f"{own} has no place in the order"
    for dotted in _imports(path):
        if not dotted.startswith("jspec"):
            continue
        if dotted == "jspec" or _room(dotted) in {"__version__", *jspec.__all__} - set(ROOMS):
            assert own == "cli", f"{path.name} uses the public API, which stands on top of it"
            continue
        assert ROOMS.index(_room(dotted)) <= ROOMS.index(own), f"{path.name} imports {dotted}"


def test_no_test_file_imports_another():
    """No test file imports another, because shared code is in tests/support."""
    files = sorted((ROOT.parent / "tests").rglob("test_*.py"))
    assert len(files) > 100 and len({path.name for path in files}) == len(files)
    imported = {
        path.name: {
            node.module
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom)
        }
        for path in files
    }
    assert not {name for name, modules in imported.items() if any(str(m).startswith("test_") for m in modules)}


def test_importorskip_is_not_used_for_own_modules():
    """No test uses `importorskip` for our own modules, because a moved helper would skip the test forever."""
    ours = {path.stem for path in (ROOT.parent / "tests" / "support").glob("*.py")} | {"support", "jspec", "convert"}
    for path in (ROOT.parent / "tests").rglob("*.py"):
        names = re.findall(r"importorskip\(\"(\w+)", path.read_text(encoding="utf-8"))
        assert not ours & {*names}, path.name


def test_top_level_has_few_modules():
    assert len([*ROOT.glob("*.py")]) <= 8


def test_few_module_names_are_reused(report):
    """At most five module names are reused, not counting `base` and `__init__`, which are conventional."""
    counts = Counter(path.stem for path in FILES if path.is_relative_to(ROOT))
    shared = sorted(stem for stem, count in counts.items() if count > 1 and stem not in ("__init__", "base"))
    report(shared=shared)
    assert len(shared) <= 5


def test_imports_form_no_cycle():
    """Imports form no cycle, even counting function-level imports."""
    modules = {_name(path): path for path in FILES}
    needs = {name: _modules(path, modules.keys()) for name, path in modules.items()}
    assert [*graphlib.TopologicalSorter(needs).static_order()]  # raises CycleError


def test_moved_module_paths_name_new_path():
    for old, new in moved.MOVED.items():
        assert importlib.util.find_spec(new), new
        if old in (
            "jspec.completion",
            "jspec.eagle",
            "jspec.prompts",
            "jspec.report",
        ):  # paths that the documentation used
            assert importlib.import_module(old) is importlib.import_module(new)
            continue
        with pytest.raises(ModuleNotFoundError, match=re.escape(f"{old} has moved; import {new} instead.")):
            importlib.import_module(old)
    with pytest.raises(ImportError, match=r"jspec\.llama has moved; import jspec\.models\.llama instead"):
        exec("from jspec import llama")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'jspec\.nowhere'"):
        importlib.import_module("jspec.nowhere")


@pytest.mark.parametrize("path", FILES, ids=_name)
def test_convert_does_not_import_jspec_or_torch(path):
    imported = {dotted.split(".")[0] for dotted in _imports(path)}
    assert "torch" not in imported
    if _name(path).startswith("convert"):
        assert "jspec" not in imported


def test_files_and_functions_are_small(report):
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    functions = {
        f"{path.name}:{node.name}": node.end_lineno - node.lineno + 1
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    longest_file, longest_function = max(files, key=files.get), max(functions, key=functions.get)
    report(
        files=len(files),
        longest_file=f"{longest_file.name} {files[longest_file]}",
        functions=len(functions),
        longest_function=f"{longest_function} {functions[longest_function]}",
    )
    assert files[longest_file] <= 350
    assert functions[longest_function] <= 70


def _parameters(function):
    """Return the number of a function's parameters, apart from `self` and `cls`."""
    names = [part.arg for part in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def test_types_are_declared(report):
    """Few values are `Any`, few attributes are probed, and few functions take many parameters."""
    texts = {path: path.read_text(encoding="utf-8") for path in FILES}
    thousands = sum(len(text.splitlines()) for text in texts.values()) / 1000
    untyped = sum(len(re.findall(r"\bAny\b", text)) for text in texts.values()) / thousands
    probes = sum(len(re.findall(r"\b(?:getattr|hasattr)\(", text)) for text in texts.values()) / thousands
    wide = {
        f"{_name(path)}.{node.name}": _parameters(node)
        for path, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and _parameters(node) > 8 and not _name(path).startswith("jspec.cli")
    }
    report(any_per_1000_lines=round(untyped, 1), probes_per_1000_lines=round(probes, 1), wide=len(wide))
    assert untyped <= 4
    assert probes <= 1
    public = {"complete", "stream", "generate", "speculative_generate", "start", "plan", "train_drafter", "tune"}
    public |= {"__init__"}
    assert {name.rsplit(".", 1)[1] for name in wide} - public <= WIDE


def test_tiers_name_tests(unknown_tests):
    assert unknown_tests == []
