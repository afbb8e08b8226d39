"""From numbers to causes: each cause on its own evidence, and no cause without it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc.diagnosis import Evidence, LayerGrowth, diagnose, layer_growth

NO_GROWTH = LayerGrowth({}, (), (), (), None, None)
CALM = Evidence(
    norm=640.0,
    limit=1.6,
    kind="token",
    num_culprits=1,
    growth=NO_GROWTH,
    log_ratio=0.02,
    sequence_log_ratio=0.1,
    largest_token_log_ratio_in_sequence=0.05,
    median_log_ratio=0.0,
    coefficient=1e-3,
    median_coefficient=1e-3,
    logp=-1.0,
    advantage=1.0,
    median_advantage=0.9,
)


def names(evidence):
    return [cause.name for cause in diagnose(evidence)]


def test_calm_evidence_names_no_cause():
    (cause,) = diagnose(CALM)
    assert (cause.name, cause.confidence) == ("unknown", "low")


@pytest.mark.parametrize(
    ("log_ratio", "confidence"),
    [(math.log(2e5), "high"), (89.0, "high"), (math.log(6), "medium"), (math.log(1e-30), "high"), (800.0, "high")],
)
def test_a_token_whose_ratio_left_its_range_is_a_mismatch(log_ratio, confidence):
    cause = diagnose(replace(CALM, log_ratio=log_ratio))[0]
    assert (cause.name, cause.confidence) == ("token-mismatch", confidence)
    assert cause.evidence["log_ratio"] == log_ratio


def test_harmless_tokens_that_add_up_are_a_sequence_mismatch():
    """A hundred tokens at 1.2 % each: ratio 3.32."""
    evidence = replace(CALM, kind="sequence", sequence_log_ratio=1.2, largest_token_log_ratio_in_sequence=0.012)
    cause = diagnose(evidence)[0]
    assert cause.name == "sequence-mismatch"
    assert cause.evidence["ratio"] == pytest.approx(3.32, abs=0.01)


def test_a_leave_one_out_advantage_is_an_outlier_not_a_mismatch():
    """Seven equal rewards and one that differs, divided by a rounding residue."""
    evidence = replace(CALM, advantage=-3e7, median_advantage=0.3)
    assert names(evidence) == ["advantage-outlier"]
    assert diagnose(evidence)[0].confidence == "high"


def test_a_bias_of_all_tokens_is_no_tokens_fault():
    """Rollouts at temperature 0.6, trained at 1."""
    evidence = replace(CALM, kind="batch-wide", num_culprits=0, median_log_ratio=0.4)
    cause = diagnose(evidence)[0]
    assert (cause.name, cause.confidence) == ("systematic-mismatch", "high")


def test_coefficients_as_large_as_advantages_mean_the_loss_was_not_normalised():
    evidence = replace(CALM, kind="batch-wide", num_culprits=0, coefficient_over_advantage=1.0)
    assert names(evidence) == ["unnormalised-loss"]
    assert names(replace(evidence, coefficient_over_advantage=1e-5)) == ["batch-wide"]


def test_a_culprit_outside_the_mask_is_a_mask_fault():
    assert names(replace(CALM, in_mask=False))[0] == "mask-fault"


def test_a_large_coefficient_is_named_where_nothing_explains_it():
    assert names(replace(CALM, coefficient=1.0)) == ["coefficient-outlier"]
    assert names(replace(CALM, coefficient=1.0, log_ratio=9.0)) == ["token-mismatch"]


def growth_of(factors):
    healthy = {"embedding": 0.1, "head": 0.2, "norm": 0.01}
    healthy |= {f"layers.{i}.{kind}": 0.1 for i in range(6) for kind in ("attention", "mlp", "norm")}
    now = {key: value * factors.get(key.rsplit(".", 1)[0], 1.0) for key, value in healthy.items()}
    return layer_growth(now, healthy)


def test_shallow_layers_that_explode_together_are_type_b():
    growth = growth_of({"layers.0": 900.0, "layers.1": 140.0, "embedding": 1700.0})
    assert growth.blocks_exploding == ("embedding", "layers.0", "layers.1")
    assert growth.kinds_exploding == ("attention", "embedding", "mlp", "norm")
    assert growth.is_heterogeneous
    evidence = replace(CALM, growth=growth, residual_rms_ratio=1.4e-3, residual_block="layers.1")
    cause = diagnose(evidence)[0]
    assert (cause.name, cause.confidence) == ("layer-heterogeneity", "high")
    assert "layers.1" in cause.summary
    # Without the residual stream's evidence it is less sure, with a ratio that explains it a side note.
    assert diagnose(replace(CALM, growth=growth))[0].confidence == "medium"
    assert diagnose(replace(CALM, growth=growth, log_ratio=12.0))[0].name == "token-mismatch"


def test_layers_that_grow_alike_are_not():
    growth = growth_of({f"layers.{i}": 500.0 for i in range(6)} | {"embedding": 500.0, "head": 500.0, "norm": 500.0})
    assert not growth.is_heterogeneous
    assert len(growth.blocks_exploding) == 9


def test_a_head_that_takes_over_explodes_alone():
    growth = layer_growth({"head": 0.58, "layers.0.mlp": 0.11}, {"head": 0.1, "layers.0.mlp": 0.11})
    assert growth.blocks_exploding == ("head",)


@pytest.mark.parametrize("healthy", [{}, {"other": 1.0}])
def test_unknown_healthy_norms_name_no_layer(healthy):
    assert layer_growth({"layers.0.mlp": 9.0}, healthy).blocks_exploding == ()


def test_a_layer_that_was_silent_grows_without_bound():
    growth = layer_growth({"layers.0.mlp": 1.0, "layers.1.mlp": 0.0}, {"layers.0.mlp": 0.0, "layers.1.mlp": 0.0})
    assert growth.by_key == {"layers.0.mlp": math.inf, "layers.1.mlp": 1.0}


maybe = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True))


@given(
    log_ratio=maybe,
    total=maybe,
    largest=maybe,
    median=maybe,
    advantage=maybe,
    median_advantage=maybe,
    rms=maybe,
    logp=maybe,
    coefficient=maybe,
    kind=st.sampled_from(["token", "sequence", "batch-wide", "not-reproduced", "inconclusive", "accounting"]),
)
def test_any_numbers_give_a_diagnosis(
    log_ratio, total, largest, median, advantage, median_advantage, rms, logp, coefficient, kind
):
    evidence = replace(
        CALM,
        kind=kind,
        log_ratio=log_ratio,
        sequence_log_ratio=total,
        largest_token_log_ratio_in_sequence=largest,
        median_log_ratio=median,
        advantage=advantage,
        median_advantage=median_advantage,
        residual_rms_ratio=rms,
        logp=logp,
        coefficient=coefficient,
    )
    causes = diagnose(evidence)
    assert causes
    order = [("high", "medium", "low").index(cause.confidence) for cause in causes]
    assert order == sorted(order)
    assert all(len(cause.summary) <= 512 for cause in causes)
