"""Every planted bug in `mutants` must be caught.

The judges are those of the other tests: the joint distribution of three tokens, the algebra of one round, outputs token
by token, and streams and draws one by one. Unpatched, jspec passes every judge on the same draws, in some cases in
those files.
"""

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.decoding.program import decode_program
from jspec.drafters import FallbackDrafter, ModelDrafter, RetrievalDrafter
from support import keys, mutants, oracle, probs, toys
from support.accept import algebra_error
from support.alone import NEW, ROWS, differing
from support.mutant_checks import DRAWS, NUM_TOKENS, PROMPT, SETTINGS, VOCAB, law, texts
from support.oracle import ALPHA


def block_law():
    return law(rule="block", draws=50_000)


def law_without_filters():
    """Judge the program that leaves out filters and penalties."""
    return law({"temperature": 0.7})


def block_law_without_filters():
    return law({"temperature": 0.7}, rule="block")


def law_of_fallbacks():
    """Judge a fallback whose first drafter, a corpus, ends within the draft: it drafts token 0 but not token 1."""
    corpus = RetrievalDrafter.from_tokens([0, 6, 2], VOCAB, max_ngram=1, min_ngram=1)
    return law({}, drafter=FallbackDrafter(corpus, ModelDrafter(toys.markov_pair(7)[1])), length=jspec.UpTo(2))


def impossible_texts():
    """Judge whether tokens with p = 0 are emitted when every acceptance draw is u = 0."""
    out = texts({"temperature": 1.0, "top_k": 3})
    table = np.asarray(toys.markov_pair(7)[0].table)
    possible = np.stack([oracle.sampling_law(row, top_k=3) > 0 for row in table])
    tokens = np.concatenate([np.full((DRAWS, 1), PROMPT[-1]), out.tokens], axis=1)
    live = np.arange(NUM_TOKENS) < np.asarray(out.lengths)[:, None]
    return no_chance(wrong=(live & ~possible[tokens[:, :-1], tokens[:, 1:]]).sum(), of=live.sum())


def no_chance(wrong, of, allowed=0):
    """Return a p-value of 0 or 1 if no chance is involved, and a description of the result."""
    return float(wrong <= allowed), f"{wrong} wrong of {of}, {allowed} allowed, no chance involved"


def algebra():
    """Judge the algebra of one round in float32."""
    error, _ = algebra_error(np.float32, pairs=2_000)
    return float(error <= 1e-6), f"algebra error {error:.1e}, tolerance 1e-06, no chance involved"


def acceptance_of_itself():
    """Judge the rejections of a draft equal to the target; only rounding may cause any."""
    stats_ = texts(SETTINGS, drafter=ModelDrafter(toys.markov_pair(7)[0])).stats
    return no_chance(int((stats_.drafted - stats_.accepted).sum()), int(stats_.drafted.sum()), allowed=2)


def alone(name):
    """Judge the output of plain decoding with one sampling parameter alone."""
    return no_chance(differing(name), ROWS * NEW)


def repetition_penalty():
    return alone("repetition_penalty")


def presence_penalty():
    return alone("presence_penalty")


def frequency_penalty():
    return alone("frequency_penalty")


def streams():
    return no_chance(*keys.repeated_streams())


def draws_of_a_large_vocabulary():
    return no_chance(probs.wrong_draws()[0], 80)


def reach_of_the_noise():
    farthest = keys.farthest_noise()
    least = keys.REACH
    return float(farthest > least), f"noise up to {farthest:.0f}, {least:.0f} wanted, no chance involved"


MUTANTS = {
    law: (
        mutants.shared_noise,
        mutants.raw_q,
        mutants.bonus_from_q,
        mutants.temperature_on_one_side,
        mutants.verified_one_position_off,
        mutants.one_key_for_all_rows,
        mutants.top_p_after_the_residual,
        mutants.penalty_not_advanced_in_verify,
        mutants.eos_ignored,
    ),
    block_law: (mutants.unclamped_residual, mutants.weight_left_out, mutants.weight_not_carried),
    law_without_filters: (mutants.temperature_forgotten_alone,),
    law_of_fallbacks: (mutants.picked_by_position,),
    impossible_texts: (mutants.inclusive_comparison,),
    algebra: (mutants.rounded_to_bfloat16,),
    acceptance_of_itself: (mutants.penalty_not_advanced_in_draft,),
    repetition_penalty: (mutants.repetition_forgotten,),
    presence_penalty: (mutants.presence_forgotten,),
    frequency_penalty: (mutants.frequency_forgotten,),
    streams: (
        mutants.streams_begin_anew_after_512,
        mutants.two_purposes_with_one_number,
        mutants.stride_below_the_number_of_purposes,
        mutants.trials_with_the_keys_of_texts,
    ),
    draws_of_a_large_vocabulary: (mutants.masses_rounded_to_bfloat16, mutants.tokens_in_16_bits),
    reach_of_the_noise: (mutants.gumbel_of_low_mode,),
}
# The other judges pass in the files they are from.
TEXTS = (
    law,
    block_law,
    law_without_filters,
    block_law_without_filters,
    law_of_fallbacks,
    impossible_texts,
    acceptance_of_itself,
)
PLANTED = [(judge, mutant) for judge, planted in MUTANTS.items() for mutant in planted]


@pytest.fixture
def patch(monkeypatch):
    """Yield a `setattr` that is undone after the test. No program from before, or with the bug, is reused."""
    decode_program.clear_cache()
    yield monkeypatch.setattr
    monkeypatch.undo()
    decode_program.clear_cache()


def prepare(judge, patch):
    """Set u = 0 everywhere for the judge that needs it."""
    if judge is impossible_texts:
        mutants.in_rules(patch, "uniform", lambda keys: jnp.zeros(keys.shape, jnp.float32))


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("judge", TEXTS, ids=lambda judge: judge.__name__)
def test_unpatched_jspec_passes(report, judge, patch):
    prepare(judge, patch)
    p, figure = judge()
    report(unpatched=figure)
    assert p > 1e-3


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize(("judge", "mutant"), PLANTED, ids=lambda f: f.__name__)
def test_planted_bug_is_caught(report, judge, mutant, patch):
    prepare(judge, patch)
    mutant(patch)
    p, figure = judge()
    report(caught_at=figure, alpha=ALPHA)
    assert p < ALPHA
