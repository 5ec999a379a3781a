"""Modules that have moved: importing an old path raises an error that names the new one."""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

# Old path -> new path.
MOVED = {
    "convert.draft_vocabulary": "convert.heads.draft_vocabulary",
    "convert.eagle_config": "convert.heads.eagle.config",
    "convert.eagle_fields": "convert.heads.eagle.parse_config",
    "convert.eagle_files": "convert.heads.eagle.files",
    "convert.eagle_json": "convert.heads.eagle.write_config",
    "convert.eagle_keys": "convert.heads.eagle.tensor_names",
    "convert.fields": "convert.json_fields",
    "convert.from_gguf": "convert.gguf.reader",
    "convert.gguf_config": "convert.gguf.config",
    "convert.gguf_header": "convert.gguf.header",
    "convert.gguf_splits": "convert.gguf.pre_tokenizers",
    "convert.gguf_tokenizer": "convert.gguf.tokenizer",
    "convert.gguf_types": "convert.gguf.tensor_types",
    "convert.gguf_vocabulary": "convert.gguf.vocabulary",
    "convert.head_files": "convert.heads.files",
    "convert.layout": "convert.shard_layout",
    "convert.llama_json": "convert.config_json",
    "convert.medusa_config": "convert.heads.medusa_config",
    "convert.medusa_files": "convert.heads.medusa_files",
    "convert.names": "convert.hub_names",
    "jspec.attention": "jspec.models.attention",
    "jspec.auto": "jspec.tuning.tune",
    "jspec.cache": "jspec.models.kv_cache",
    "jspec.checks": "jspec.decoding.validate_arguments",
    "jspec.cli.engines": "jspec.cli.engine_args",
    "jspec.cli.lines": "jspec.cli.line_input",
    "jspec.cli.output": "jspec.cli.printing",
    "jspec.cli.prompts": "jspec.cli.read_prompts",
    "jspec.cli.shared": "jspec.cli.common",
    "jspec.cli.sources": "jspec.cli.model_args",
    "jspec.completion": "jspec.generation.complete",
    "jspec.decode": "jspec.generation.generate",
    "jspec.derivatives": "jspec.core.derivatives",
    "jspec.detokenizer": "jspec.core.detokenizer",
    "jspec.devices": "jspec.core.devices",
    "jspec.draft_length": "jspec.drafters.draft_length",
    "jspec.drafters.asked": "jspec.drafters.capabilities",
    "jspec.drafters.autoregressive": "jspec.drafters.standalone.autoregressive",
    "jspec.drafters.blockwise": "jspec.drafters.heads.blockwise",
    "jspec.drafters.cascade": "jspec.drafters.combine.cascade",
    "jspec.drafters.checked": "jspec.drafters.validate_draft",
    "jspec.drafters.duo": "jspec.drafters.combine.base",
    "jspec.drafters.dynamic_tree": "jspec.drafters.trees.dynamic",
    "jspec.drafters.eagle": "jspec.drafters.heads.eagle",
    "jspec.drafters.early_exit": "jspec.drafters.standalone.early_exit",
    "jspec.drafters.fallback": "jspec.drafters.combine.fallback",
    "jspec.drafters.horizontal": "jspec.drafters.combine.horizontal",
    "jspec.drafters.hydra": "jspec.drafters.heads.hydra",
    "jspec.drafters.kangaroo": "jspec.drafters.heads.kangaroo",
    "jspec.drafters.lookahead": "jspec.drafters.standalone.lookahead",
    "jspec.drafters.medusa": "jspec.drafters.heads.medusa",
    "jspec.drafters.medusa_weights": "jspec.drafters.heads.medusa_weights",
    "jspec.drafters.mixture": "jspec.drafters.combine.mixture",
    "jspec.drafters.model": "jspec.drafters.standalone.model",
    "jspec.drafters.multi": "jspec.drafters.combine.multi",
    "jspec.drafters.ngram": "jspec.drafters.standalone.ngram",
    "jspec.drafters.own_files": "jspec.drafters.heads.own_files",
    "jspec.drafters.parallel_sampling": "jspec.drafters.heads.parallel_sampling",
    "jspec.drafters.reading": "jspec.drafters.chunked_prefill",
    "jspec.drafters.recycling": "jspec.drafters.standalone.recycling",
    "jspec.drafters.retrieval": "jspec.drafters.standalone.retrieval",
    "jspec.drafters.tables": "jspec.drafters.standalone.tables",
    "jspec.drafters.tree": "jspec.drafters.trees.static",
    "jspec.eagle": "jspec.drafters.heads.eagle_module",
    "jspec.eagle_weights": "jspec.drafters.heads.eagle_weights",
    "jspec.end_of_turn": "jspec.text.end_of_turn",
    "jspec.engine.arguments": "jspec.engine.validate_options",
    "jspec.engine.choice": "jspec.engine.length_policy",
    "jspec.engine.compiler": "jspec.engine.background_compile",
    "jspec.engine.device": "jspec.engine.runner",
    "jspec.engine.news": "jspec.engine.slot_output",
    "jspec.engine.pace": "jspec.engine.round_budget",
    "jspec.engine.rehearsal": "jspec.engine.warmup",
    "jspec.engine.room": "jspec.engine.memory_budget",
    "jspec.exit_tuning": "jspec.tuning.tune_exit",
    "jspec.footprint": "jspec.planning.memory",
    "jspec.half": "jspec.models.float16_check",
    "jspec.head_data": "jspec.bundled.head_data",
    "jspec.kernels": "jspec.models.kernels",
    "jspec.keys": "jspec.core.keys",
    "jspec.layers": "jspec.models.layers",
    "jspec.layout": "jspec.models.array_layout",
    "jspec.left_padding": "jspec.decoding.left_padding",
    "jspec.llama": "jspec.models.llama",
    "jspec.model_sampling": "jspec.models.sampling_defaults",
    "jspec.names": "jspec.bundled.pretrained",
    "jspec.origins": "jspec.core.origins",
    "jspec.output": "jspec.decoding.buffers",
    "jspec.picture": "jspec.core.round_display",
    "jspec.probs": "jspec.core.probs",
    "jspec.program": "jspec.decoding.program",
    "jspec.prompts": "jspec.text.chat_template",
    "jspec.quantizer": "jspec.models.quantize",
    "jspec.recording": "jspec.decoding.recording",
    "jspec.report": "jspec.cli.report",
    "jspec.roofline": "jspec.planning.roofline",
    "jspec.rope": "jspec.models.rope",
    "jspec.round": "jspec.decoding.round",
    "jspec.rows": "jspec.core.row_ops",
    "jspec.sampling": "jspec.core.sampling",
    "jspec.serve.asked": "jspec.serve.parse_request",
    "jspec.serve.body": "jspec.serve.request_body",
    "jspec.serve.constraints": "jspec.serve.constraint_jobs",
    "jspec.serve.figures": "jspec.serve.usage",
    "jspec.serve.responses": "jspec.serve.answers",
    "jspec.serve.sending": "jspec.serve.sse",
    "jspec.serve.text": "jspec.serve.token_text",
    "jspec.sharding": "jspec.core.sharding",
    "jspec.state": "jspec.decoding.state",
    "jspec.streaming": "jspec.generation.stream",
    "jspec.template_variables": "jspec.text.template_variables",
    "jspec.tokenizer_config": "jspec.text.tokenizer_config",
    "jspec.tokenizer_file": "jspec.text.tokenizer_file",
    "jspec.training.eagle": "jspec.training.eagle_training",
    "jspec.training.result": "jspec.training.evaluate",
    "jspec.training.rows": "jspec.training.dataset",
    "jspec.training.sight": "jspec.training.target_states",
    "jspec.training.writing": "jspec.training.self_generated",
    "jspec.transfers": "jspec.core.transfers",
    "jspec.tree": "jspec.core.tree",
    "jspec.tree_checks": "jspec.decoding.validate_tree",
    "jspec.tree_tuning": "jspec.tuning.tune_tree",
    "jspec.tree_yield": "jspec.theory.tree_yield",
    "jspec.tuning_checks": "jspec.tuning.validate_tuning",
    "jspec.types": "jspec.core.types",
    "jspec.verify": "jspec.decoding.verify",
    "jspec.weights": "jspec.models.load",
    "jspec.writer": "jspec.text.stop_strings",
}
# Old paths that the documentation used to show. Imports from them still work.
TAUGHT = ("jspec.completion", "jspec.eagle", "jspec.prompts", "jspec.report")


class MovedModules:
    """A finder for `sys.meta_path`. Python asks it only for modules that no other finder has found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the new module's spec for an old path in `TAUGHT`.

        Raises:
            ModuleNotFoundError: the module has moved. The message names its new path.
        """
        new = MOVED.get(name)
        if new is None:
            return None
        if name not in TAUGHT:
            raise ModuleNotFoundError(f"{name} has moved; import {new} instead.")
        return ModuleSpec(name, _Alias(new))


class _Alias(Loader):
    """A loader that returns the module at the new path for an old path."""

    def __init__(self, new: str):
        self._new = new

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the new module."""
        module = importlib.import_module(self._new)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's spec, which the import replaced. The module has already run under its new path."""
        module.__spec__ = self._spec


def install() -> None:
    """Handle imports of old paths from now on."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.append(MovedModules)
