"""Evaluation: pass@k over groups of samples, and in-process lm-eval."""

from jspec.evaluation.pass_at_k import pass_at_k as pass_at_k
