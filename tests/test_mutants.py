"""Every planted bug of `mutants` must be caught.

The judges are those of the other tests: the joint law of three tokens, the algebra of one round, texts token by token,
streams and draws one by one. Unpatched, jspec passes every one of them on the same draws, some in those files.
"""

import jax
import jax.numpy as jnp
import mutants
import numpy as np
import oracle
import pytest
import test_alone
import test_keys
import test_probs
import toys
from oracle import ALPHA
from scipy import stats
from test_accept import algebra_error

import jspec
from jspec.acceptance import RULES
from jspec.core import sampling
from jspec.decoding.program import decode_program
from jspec.drafters import FallbackDrafter, ModelDrafter, RetrievalDrafter

DRAWS, VOCAB, NUM_TOKENS, EOS, PROMPT = 20_000, 8, 3, 5, (3, 6)
SETTINGS = {"temperature": 0.7, "top_p": 0.85, "repetition_penalty": 1.2, "presence_penalty": 0.6,
            "frequency_penalty": 0.4}  # fmt: skip


def texts(sampling_settings, drafter=None, rule="rejection", length=2, draws=DRAWS):
    """`draws` texts of up to three tokens from whatever jspec is at this moment; other settings are left out of it."""
    target, other = toys.markov_pair(7)
    fields = {name: jnp.float32(value) for name, value in sampling_settings.items()}
    transforms = toys.both_transforms(sampling.SamplingParams(**fields), draws)
    tokens = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (draws, len(PROMPT)))
    keys = jax.random.split(jax.random.key(8), draws)
    return toys.decode(target, drafter or ModelDrafter(other), tokens, jnp.full(draws, len(PROMPT)), keys, transforms,
                       max_new_tokens=NUM_TOKENS, num_draft_tokens=length, eos_ids=(EOS,),
                       rule=RULES[rule])  # fmt: skip


def law(settings=SETTINGS, **options):
    """p of the joint law of the texts, and the power to see at `ALPHA` a bias of the size that was seen."""
    table = np.asarray(toys.markov_pair(7)[0].table)

    def next_law(text):
        last = text[-1] if text else PROMPT[-1]
        return oracle.sampling_law(table[last], prompt=PROMPT, generated=text, **settings)

    out = texts(settings, **options)
    observed = np.bincount(np.asarray(out.tokens) @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**NUM_TOKENS)
    statistic, freedom = oracle.chi_square(observed, oracle.joint_law(next_law, VOCAB, NUM_TOKENS, eos=(EOS,)))
    seen = max(statistic - freedom, 0)
    # scipy's noncentral law is slow and of no use where the statistic is astronomic.
    power = 1.0 if seen > 1e4 else stats.ncx2.sf(stats.chi2.isf(ALPHA, freedom), freedom, seen)
    p, sees = oracle.p_of(statistic, freedom), oracle.detectable(observed.sum(), freedom)
    return p, f"p = {p:.1e}, power {power:.4f}, sees any tv of {sees:.3f}"


def block_law():
    return law(rule="block", draws=50_000)


def law_without_filters():
    """The program from which filters and penalties are left out."""
    return law({"temperature": 0.7})


def block_law_without_filters():
    return law({"temperature": 0.7}, rule="block")


def law_of_fallbacks():
    """First a corpus that ends within the draft: a guess for token 0 and none for token 1."""
    corpus = RetrievalDrafter.from_tokens([0, 6, 2], VOCAB, max_ngram=1, min_ngram=1)
    return law({}, drafter=FallbackDrafter(corpus, ModelDrafter(toys.markov_pair(7)[1])), length=jspec.UpTo(2))


def impossible_texts():
    """Tokens with p = 0 that are written when every acceptance draw is u = 0; as a p-value, 0 or 1."""
    out = texts({"temperature": 1.0, "top_k": 3})
    table = np.asarray(toys.markov_pair(7)[0].table)
    possible = np.stack([oracle.sampling_law(row, top_k=3) > 0 for row in table])
    tokens = np.concatenate([np.full((DRAWS, 1), PROMPT[-1]), out.tokens], axis=1)
    live = np.arange(NUM_TOKENS) < np.asarray(out.lengths)[:, None]
    return no_chance(wrong=(live & ~possible[tokens[:, :-1], tokens[:, 1:]]).sum(), of=live.sum())


def no_chance(wrong, of, allowed=0):
    """A p-value where no chance is involved, 0 or 1, and the figure."""
    return float(wrong <= allowed), f"{wrong} wrong of {of}, {allowed} allowed, no chance involved"


def algebra():
    """The algebra of one round in float32."""
    error, _ = algebra_error(np.float32, pairs=2_000)
    return float(error <= 1e-6), f"algebra error {error:.1e}, tolerance 1e-06, no chance involved"


def acceptance_of_itself():
    """Refusals of a draft equal to the target, of which there are none but for rounding."""
    stats_ = texts(SETTINGS, drafter=ModelDrafter(toys.markov_pair(7)[0])).stats
    return no_chance(int((stats_.drafted - stats_.accepted).sum()), int(stats_.drafted.sum()), allowed=2)


def alone(name):
    """Texts of plain decoding with one sampling parameter alone."""
    return no_chance(test_alone.differing(name), test_alone.ROWS * test_alone.NEW)


def repetition_penalty():
    return alone("repetition_penalty")


def presence_penalty():
    return alone("presence_penalty")


def frequency_penalty():
    return alone("frequency_penalty")


def streams():
    return no_chance(*test_keys.repeated_streams())


def draws_of_a_large_vocabulary():
    return no_chance(test_probs.wrong_draws()[0], 80)


def reach_of_the_noise():
    farthest = test_keys.farthest_noise()
    least = test_keys.REACH
    return float(farthest > least), f"noise up to {farthest:.0f}, {least:.0f} wanted, no chance involved"


MUTANTS = {
    law: (mutants.shared_noise, mutants.raw_q, mutants.bonus_from_q, mutants.temperature_on_one_side,
          mutants.verified_one_position_off, mutants.one_key_for_all_rows, mutants.top_p_after_the_residual,
          mutants.penalty_not_advanced_in_verify, mutants.eos_ignored),
    block_law: (mutants.unclamped_residual, mutants.weight_left_out, mutants.weight_not_carried),
    law_without_filters: (mutants.temperature_forgotten_alone,),
    law_of_fallbacks: (mutants.picked_by_position,),
    impossible_texts: (mutants.inclusive_comparison,),
    algebra: (mutants.rounded_to_bfloat16,),
    acceptance_of_itself: (mutants.penalty_not_advanced_in_draft,),
    repetition_penalty: (mutants.repetition_forgotten,),
    presence_penalty: (mutants.presence_forgotten,),
    frequency_penalty: (mutants.frequency_forgotten,),
    streams: (mutants.streams_begin_anew_after_512, mutants.two_purposes_with_one_number,
              mutants.stride_below_the_number_of_purposes, mutants.trials_with_the_keys_of_texts),
    draws_of_a_large_vocabulary: (mutants.masses_rounded_to_bfloat16, mutants.tokens_in_16_bits),
    reach_of_the_noise: (mutants.gumbel_of_low_mode,),
}  # fmt: skip
# The others pass in the files they are from.
TEXTS = (law, block_law, law_without_filters, block_law_without_filters, law_of_fallbacks, impossible_texts,
         acceptance_of_itself)  # fmt: skip
PLANTED = [(judge, mutant) for judge, planted in MUTANTS.items() for mutant in planted]


@pytest.fixture
def patch(monkeypatch):
    """`setattr` that ends with the test; no program from before, or with the bug, is used again."""
    decode_program.clear_cache()
    yield monkeypatch.setattr
    monkeypatch.undo()
    decode_program.clear_cache()


def prepare(judge, patch):
    """At u = 0 everywhere for the judge that asks for it."""
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
