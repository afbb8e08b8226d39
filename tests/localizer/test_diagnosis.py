"""From numbers to causes: each cause on its own evidence, and no cause without it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc.diagnosis import diagnose, is_tokens_fault
from gradloc.layer_growth import LayerGrowth, layer_growth
from gradloc.localized import verdict_of
from gradloc.measured import Evidence

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


def test_a_row_that_counts_by_its_ratio_is_a_sequence_mismatch_though_one_token_holds_the_gradient():
    """A trainer that corrects by whole sequences scales all of a row's coefficients by the product."""
    evidence = replace(CALM, log_ratio=0.6, sequence_log_ratio=3.2, largest_token_log_ratio_in_sequence=1.1)
    cause = diagnose(replace(evidence, row_scale=24.7))[0]
    assert (cause.name, cause.confidence) == ("sequence-mismatch", "high")
    assert verdict_of("token", cause) == "sequence"
    for scale in (1.0, 2.0, 700.0, None):
        assert diagnose(replace(evidence, row_scale=scale))[0].confidence != "high"


def test_one_wrong_token_in_a_row_that_counts_as_usual_is_the_tokens_fault():
    """A bad answer whose tokens all have large gradients, one of them by a ratio of 20."""
    evidence = replace(CALM, kind="sequence", log_ratio=3.0, row_scale=1.3)
    cause = diagnose(evidence)[0]
    assert cause.name == "token-mismatch"
    assert is_tokens_fault(evidence, cause)
    assert not is_tokens_fault(replace(evidence, row_scale=9.0), cause)
    assert not is_tokens_fault(replace(evidence, kind="batch-wide"), cause)
    outlier = replace(evidence, log_ratio=0.1, advantage=900.0)
    assert not is_tokens_fault(outlier, diagnose(outlier)[0])


def test_ids_that_were_made_from_text_again_are_retokenization():
    evidence = replace(CALM, log_ratio=8.8, num_other_ids=5, first_other_id=10, other_ids_same_text=True)
    assert names(evidence)[0] == "retokenization"
    assert names(replace(evidence, other_ids_same_text=False))[0] == "alignment"
    assert names(replace(evidence, log_ratio=0.1)) == ["unknown"], "other ids that do no harm"
    assert names(replace(evidence, num_other_ids=0))[0] == "token-mismatch"


def test_log_odds_that_are_all_larger_are_another_temperature():
    evidence = replace(CALM, log_ratio=9.0, sharpness=1.7, sharpness_scatter=0.2)
    cause = diagnose(evidence)[0]
    assert (cause.name, cause.confidence) == ("systematic-mismatch", "high")
    assert cause.evidence["temperature"] == pytest.approx(1 / 1.7)
    assert verdict_of("token", cause) == "batch-wide"
    for slope, scatter in ((1.02, 0.01), (1.3, 0.9), (None, None), (math.nan, math.nan), (-2.0, 0.1), (0.0, 0.0)):
        assert names(replace(evidence, sharpness=slope, sharpness_scatter=scatter))[0] == "token-mismatch"


def test_a_rank_that_holds_another_gradient_is_hardware_only_where_nothing_was_reproduced():
    evidence = replace(CALM, kind="not-reproduced", num_culprits=0, odd_rank=3, odd_rank_norm=8.8e35)
    cause = diagnose(evidence)[0]
    assert (cause.name, cause.confidence, cause.evidence["rank"]) == ("hardware", "high", 3.0)
    assert names(replace(evidence, odd_rank=None)) == ["not-reproduced"]
    assert "hardware" not in names(replace(evidence, kind="token", num_culprits=1))


def test_a_learning_rate_far_above_the_usual_explains_what_no_token_does():
    rates = {"metrics": {"lr": 4e-3}, "metrics_usual": {"lr": 1e-4}}
    wide = replace(CALM, kind="batch-wide", num_culprits=0, **rates)
    cause = diagnose(wide)[0]
    assert (cause.name, cause.evidence["lr_usual"]) == ("learning-rate", 1e-4)
    assert names(replace(wide, metrics={"lr": 2e-4})) == ["batch-wide"]
    assert names(replace(wide, metrics_usual={})) == ["batch-wide"]
    few = replace(wide, kind="token", num_culprits=2, log_ratio=4.0)
    assert names(replace(few, log_ratio_spread=0.01))[0] == "token-mismatch", "one token out of line"
    cause = diagnose(replace(few, log_ratio_spread=0.6))[0]
    assert (cause.name, verdict_of("token", cause)) == ("learning-rate", "batch-wide")


def test_a_ratio_is_nobodys_for_certain_once_the_policy_has_run_away():
    few = replace(
        CALM, kind="token", num_culprits=1, log_ratio=4.0, metrics={"lr": 4e-3}, metrics_usual={"lr": 1e-4},
        log_ratio_spread=0.1,
    )  # fmt: skip
    moved = diagnose(replace(few, mean_log_ratio=0.3))
    assert [(cause.name, cause.confidence) for cause in moved[:2]] == [
        ("learning-rate", "medium"),
        ("token-mismatch", "medium"),
    ]
    assert verdict_of("token", moved[0]) == "token", "its removal is proved; why it is so is not"
    still = diagnose(replace(few, mean_log_ratio=0.002))
    assert [(cause.name, cause.confidence) for cause in still[:1]] == [("token-mismatch", "high")], "not acted yet"
    usual = diagnose(replace(few, mean_log_ratio=0.3, metrics={"lr": 1e-4}))
    assert [(cause.name, cause.confidence) for cause in usual[:1]] == [("token-mismatch", "high")]
    for odd in (math.nan, math.inf):
        assert diagnose(replace(few, mean_log_ratio=odd, log_ratio_spread=odd))


@pytest.mark.parametrize("share", [0.5, 0.83, 7.0])
def test_a_gradient_that_is_mostly_no_tokens_is_rest_dominated(share):
    evidence = replace(CALM, kind="accounting", num_culprits=0, rest_share=share)
    cause = diagnose(evidence)[0]
    assert (cause.name, cause.confidence, cause.evidence) == ("rest-dominated", "high", {"rest_share": share})
    assert verdict_of("accounting", cause) == "accounting"
    # It does not hide what else is known, and where the tokens explain the step the rest is a side matter.
    assert names(replace(evidence, coefficient_over_advantage=1.0)) == ["rest-dominated", "unnormalised-loss"]
    for kind in ("token", "sequence", "batch-wide", "not-reproduced", "inconclusive"):
        assert "rest-dominated" not in names(replace(evidence, kind=kind))


@pytest.mark.parametrize("share", [None, 0.49, 0.0, -3.0, math.nan, -math.inf])
def test_a_small_or_unknown_rest_is_not(share):
    assert names(replace(CALM, kind="accounting", num_culprits=0, rest_share=share)) == ["accounting"]


@pytest.mark.parametrize(("now", "confidence"), [(0.12, "high"), (0.35, "medium"), (0.5, None), (-0.3, "high")])
def test_rewards_that_fell_are_named_where_no_token_is_to_blame(now, confidence):
    evidence = replace(
        CALM, kind="batch-wide", num_culprits=0, metrics={"reward_mean": now}, metrics_usual={"reward_mean": 0.65}
    )
    found = {cause.name: cause.confidence for cause in diagnose(evidence)}
    assert found.get("reward-drop") == confidence
    assert "reward-drop" not in names(replace(evidence, kind="token"))


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
    scale=maybe,
    sharpness=maybe,
    scatter=maybe,
    size=maybe,
    now=maybe,
    usual=maybe,
    kind=st.sampled_from(["token", "sequence", "batch-wide", "not-reproduced", "inconclusive", "accounting"]),
)
def test_any_numbers_give_a_diagnosis(
    log_ratio,
    total,
    largest,
    median,
    advantage,
    median_advantage,
    rms,
    logp,
    coefficient,
    scale,
    sharpness,
    scatter,
    size,
    now,
    usual,
    kind,
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
        row_scale=scale,
        sharpness=sharpness,
        sharpness_scatter=scatter,
        log_ratio_spread=size,
        num_other_ids=1,
        odd_rank=1,
        odd_rank_norm=now,
        metrics={} if now is None else {"lr": now, "reward_mean": now},
        metrics_usual={} if usual is None else {"lr": usual, "reward_mean": usual},
    )
    causes = diagnose(evidence)
    assert causes
    order = [("high", "medium", "low").index(cause.confidence) for cause in causes]
    assert order == sorted(order)
    assert all(len(cause.summary) <= 512 for cause in causes)
