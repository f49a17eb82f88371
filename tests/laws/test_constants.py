"""Constants in the code satisfy the conditions that the proofs require."""

import pytest

from unheard.audit.one_run import REFUTATION_LEVELS
from unheard.corpus.transform import COPIED_FILES
from unheard.deployment.personalize import SHARED
from unheard.federated.node import MODEL_FILES, OWN_MODELS, TRUST
from unheard.mechanism.aggregation import GRID_BITS, LARGEST_COHORT, LARGEST_UNNOISED_UNITS, QUOTIENT_GRID_BITS
from unheard.mechanism.exact_normal import MAX_SCALE
from unheard.mechanism.noise import LARGEST_MULTIPLIER, SMALLEST_SHARE
from unheard.privacy.accountants import ERROR_PER_ROUND, FILTER_ORDERS, RDP_ORDERS, RDP_ROUNDING
from unheard.privacy.matrix_factorization import ROUNDED_UP
from unheard.privacy.run_ledger import REPEATED_FACTS
from unheard.privacy.saved_statement import EPSILON_SLACK
from unheard.randomness import KEY_BYTES
from unheard.report.tracking import NAMES
from unheard.run_folder import LOCAL_KEYS
from unheard.updates.user_update import ONE


def test_no_sum_with_its_noise_leaves_int64():
    one_user = 2 ** (GRID_BITS + 1)
    twelve_deviations = 12 * LARGEST_MULTIPLIER * one_user
    assert LARGEST_COHORT * one_user + twelve_deviations < 2**63
    assert LARGEST_UNNOISED_UNITS * 2**20 < 2**63  # a million users without a clip
    assert LARGEST_COHORT * ONE < 2**127  # weights are summed as Python's integers


def test_the_grids_are_far_below_the_noise_and_normals_fill_them():
    assert 2.0**-GRID_BITS <= 1e-6
    assert QUOTIENT_GRID_BITS == GRID_BITS
    assert LARGEST_MULTIPLIER * 2 ** (GRID_BITS + 1) <= 2**40 < MAX_SCALE <= 2**42  # float64 has 53 bits


def test_wrapping_shares_and_keys_are_as_rare_wide_and_long_as_the_proofs_say():
    assert SMALLEST_SHARE >= 32
    assert KEY_BYTES == 16
    pytest.importorskip("Crypto", reason="needs the extra flower")
    from unheard.federated.secure_aggregation import FEWEST, SECRET_BYTES, WRAP_PROBABILITY

    assert 2**20 * WRAP_PROBABILITY <= 2**-40
    assert (FEWEST, SECRET_BYTES) == (3, 31)


def test_accounting_is_rounded_up_by_more_than_its_errors():
    assert 1 + 1e-13 < ROUNDED_UP < 1 + 1e-9
    assert ERROR_PER_ROUND >= 2 * 1.1e-16
    assert (RDP_ROUNDING >= 1e-13).all()
    # Ledgers contain these orders, so they must not change.
    assert FILTER_ORDERS == (1.2, 1.5, 2.0, 3.0, 4.5, 7.0, 11.0, 18.0, 30.0, 50.0)
    assert set(FILTER_ORDERS) <= set(RDP_ORDERS.tolist())


def test_a_sound_audit_is_refuted_as_seldom_as_it_is_said_and_verify_allows_no_visible_difference():
    assert sum(REFUTATION_LEVELS.values()) < 0.07
    assert EPSILON_SLACK <= 1e-4


def test_lists_that_decide_what_is_kept_back_have_these_members_and_no_others():
    """Tests that ask a list for its own members would not notice that one of them is gone."""
    assert {*LOCAL_KEYS} == {
        *("corpus.path", "privacy.ledger", "engine.corpus_part", "model.path", "training.init_from")
    }
    assert {*SHARED} == {"ledger.jsonl", "model.safetensors", "checkpoints", "export.json", "corpus.json"}
    assert {*COPIED_FILES} == {"corpus.json", "layout.json", "vocabulary.txt"}
    assert {*REPEATED_FACTS} == {"population", "delta", "randomness", "drop_duplicates", "synthetic", "declared"}
    assert {*NAMES} == {
        *("accuracy_top1", "accuracy_top3", "accuracy_top5", "accuracy_top1_words", "loss", "perplexity", "epsilon")
    }
    assert TRUST == ("central", "secure", "distributed")  # from the most trust in the server to the least
    assert {*OWN_MODELS} == {"tied_lstm", "tied_gru"}
    names = {"run.toml", "ledger.jsonl", "federated.json", "model.safetensors", "vocabulary.txt", "tokens.json"}
    assert {*MODEL_FILES} == names
