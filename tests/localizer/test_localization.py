"""A planted cause is found, proved and named, by both strategies; a healthy or diffuse step blames nobody."""

import dataclasses
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gradloc.localization import localize
from gradloc.replay import coefficients_of, masked, replay

ONE = (1, 0, 2, 9)  # rank, micro-batch, sequence, position of the faults' default place


def places(finding):
    return [(c.rank, c.micro_batch, c.sequence, c.token) for c in finding.culprits]


def explained(step, strategy="attribution", **changes):
    return localize(step.policy(), step.placed, step.facts(**changes), strategy=strategy)


def check_proof(step, finding):
    """The certificate is what an independent replay without the culprits gives."""
    certificate = finding.certificate
    removed = [
        (c.rank * len(step.ranks[0]) + c.micro_batch, c.sequence, c.token - step.placed[0].batch.first_position)
        for c in finding.culprits
    ]
    coefficients = masked(coefficients_of(step.placed), removed)
    norm = replay(step.policy(), step.placed, coefficients).gradient.norm
    assert certificate.holds
    assert certificate.norm_without == pytest.approx(norm, rel=1e-6)
    assert certificate.norm_without <= certificate.limit


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
@pytest.mark.parametrize("log_ratio", [7.0, 9.0, 12.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_stale_token_is_found_and_proved(trainer, strategy, log_ratio, seed):
    step = trainer.faulty(trainer.model(seed), trainer.stale(log_ratio), seed=seed + 5, num_micro_batches=3)
    step.limit = min(step.limit, 1.5 * step.healthy_norm)
    shares, norms = trainer.oracle(step)
    finding = explained(step, strategy)
    assert places(finding) == [ONE]
    culprit = finding.culprits[0]
    assert finding.verdict == "token"
    assert culprit.share == pytest.approx(float(shares[3][2, 3]), abs=1e-4)
    assert culprit.norm == pytest.approx(float(norms[3][2, 3]), rel=1e-3)
    assert culprit.share_is_exact
    assert culprit.token_id == int(step.placed[3].batch.ids_BT[2, 9])
    assert culprit.uid == "r1m0s2"
    assert culprit.ratio == pytest.approx(math.exp(log_ratio), rel=1e-4)
    check_proof(step, finding)
    assert finding.causes[0].name == "token-mismatch"
    assert finding.fix.name == "TokenClip [0.5, 5]"
    assert finding.fidelity.reproduced
    assert finding.fidelity.rel_error <= 1e-5
    if strategy == "attribution":
        assert abs(finding.checksum - 1) <= 5e-3
        assert finding.certificate.minimal


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
def test_two_culprits_on_two_ranks_are_both_found(trainer, strategy):
    fault = trainer.together(trainer.extra(100.0), trainer.extra(90.0, 0, 1, 1, 2))
    step = trainer.faulty(trainer.model(), fault)
    finding = explained(step, strategy)
    assert set(places(finding)) == {ONE, (0, 1, 1, 8)}
    assert finding.verdict == "token"
    check_proof(step, finding)


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
def test_a_culprit_hidden_behind_a_larger_one_surfaces(trainer, strategy):
    fault = trainer.together(trainer.extra(3000.0), trainer.extra(90.0, 0, 1, 1, 2))
    step = trainer.faulty(trainer.model(), fault)
    finding = explained(step, strategy)
    assert places(finding) == [ONE, (0, 1, 1, 8)]
    assert finding.culprits[1].share < 0.01
    check_proof(step, finding)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_pair_that_nearly_cancels_is_found_whole(trainer, seed):
    step = trainer.faulty(trainer.model(seed), trainer.pair(3000.0), seed=seed)
    finding = explained(step)
    assert set(places(finding)) == {ONE, (0, 0, 0, 9)}
    assert {math.copysign(1, culprit.share) for culprit in finding.culprits} == {-1, 1}
    check_proof(step, finding)


def test_three_tokens_of_one_sequence_are_tokens(trainer):
    sizes = {0: 100.0, 2: -90.0, 4: 80.0}
    fault = trainer.together(*(trainer.extra(size, column=column) for column, size in sizes.items()))
    step = trainer.faulty(trainer.model(), fault)
    step.limit = 1.2 * step.healthy_norm
    finding = explained(step)
    assert finding.verdict == "token"
    assert {place[-1] for place in places(finding)} == {6, 8, 10}
    check_proof(step, finding)


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
@pytest.mark.parametrize("seed", [0, 1])
def test_an_outlying_advantage_is_its_sequences_fault(trainer, strategy, seed):
    step = trainer.faulty(trainer.model(seed), trainer.advantage(500.0), seed=seed)
    shares, _ = trainer.oracle(step)
    finding = explained(step, strategy)
    assert finding.verdict == "sequence"
    assert places(finding)[0][:3] == ONE[:3]
    assert finding.culprits[0].token == 6 + int(shares[2][2].argmax())
    assert finding.causes[0].name == "advantage-outlier"
    assert finding.certificate.holds
    assert finding.fix.name.startswith("AdvantageClip")


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
@pytest.mark.parametrize("factor", [10.0, 50.0])
def test_a_batch_that_is_large_as_a_whole_blames_nobody(trainer, strategy, factor):
    step = trainer.faulty(trainer.model(), trainer.all_advantages(factor))
    finding = explained(step, strategy)
    assert finding.verdict == "batch-wide"
    assert finding.certificate is None


@pytest.mark.parametrize("strategy", ["attribution", "bisect"])
@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_step_with_a_forced_limit_is_never_a_tokens_fault(trainer, strategy, seed):
    step = trainer.faulty(trainer.model(seed), None, seed=seed)
    finding = explained(step, strategy, limit=0.3 * step.grad_norm)
    assert finding.verdict == "batch-wide"


def test_a_step_under_its_limit_needs_no_culprit(trainer):
    step = trainer.faulty(trainer.model(), None)
    finding = explained(step)
    assert finding.verdict == "batch-wide"
    assert finding.certificate is None


def test_a_finite_coefficient_outside_the_mask_is_a_mask_fault(trainer):
    step = trainer.faulty(trainer.model(0), trainer.extra(100.0, row=1, column=11), seed=5)
    assert not bool(step.placed[2].batch.mask_BR[1, 11])
    finding = explained(step)
    assert finding.verdict == "mask"
    assert places(finding) == [(1, 0, 1, 17)]
    assert finding.fix.name == "zero the coefficients outside the mask"
    assert finding.fix.holds


def test_a_step_without_any_gradient_says_so(trainer):
    step = trainer.faulty(trainer.model(), trainer.all_advantages(0.0))
    finding = explained(step)
    assert step.grad_norm == 0.0
    assert finding.verdict == "batch-wide"
    assert finding.culprits == ()


def test_limits_are_made_up_where_none_is_known(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(9.0))
    finding = explained(step, limit=None, healthy_norm=None, healthy_layer_norms={})
    assert places(finding) == [ONE]
    assert finding.certificate.limit == pytest.approx(step.grad_norm / 2)
    # Healthy layer norms are unknown: the step without its culprit stands in.
    assert finding.layer_growth["layers.0.mlp"] > 50


def test_the_finding_is_the_same_every_time(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(6.0))
    one, other = (explained(step).model_dump(exclude={"cost"}) for _ in range(2))
    assert one == other


def test_cost_counts_the_work_in_steps(trainer):
    step = trainer.faulty(trainer.model(), trainer.stale(6.0), num_micro_batches=4)
    by_attribution, by_bisection = explained(step).cost, explained(step, "bisect").cost
    # One replay, one certificate and one remedy cost three steps at most; two forwards two thirds of one.
    assert 1.5 < by_attribution.steps < 4.2
    assert by_bisection.steps > by_attribution.steps


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(0, 1),
    micro_batch=st.integers(0, 1),
    row=st.integers(0, 3),
    column=st.integers(0, 5),
    size=st.floats(5.5, 13.0),
    seed=st.integers(0, 5),
)
def test_wherever_the_token_is_it_is_found(trainer, rank, micro_batch, row, column, size, seed):
    step = trainer.faulty(trainer.model(seed), trainer.stale(size, rank, micro_batch, row, column), seed=seed)
    finding = explained(step, limit=max(2 * step.healthy_norm, step.grad_norm / 4))
    shares, _ = trainer.oracle(step)
    batch = rank * 2 + micro_batch
    if float(shares[batch][row, column]) > 0.9:
        assert places(finding) == [(rank, micro_batch, row, 6 + column)]
        assert finding.verdict == "token"


def test_a_token_in_a_row_of_large_advantage_is_still_a_tokens_fault(trainer):
    """The row's other coefficients are large as well, but it is one token that made the spike."""
    row = trainer.advantage(6.0)
    step = trainer.faulty(trainer.model(), trainer.together(row, trainer.stale(7.0)))
    finding = explained(step)
    assert places(finding) == [ONE]
    assert finding.verdict == "token"


def scaled(factor, *, rank, micro_batch=None):
    """All advantages of a rank, or of one of its micro-batches."""

    def change(inputs):
        for number, batch in enumerate(inputs[rank]):
            if micro_batch in (None, number):
                batch["advantage"] *= factor

    return change


def test_rows_of_one_micro_batch_are_said_to_be_so(trainer):
    step = trainer.faulty(trainer.model(), scaled(40.0, rank=1, micro_batch=1), num_micro_batches=3)
    finding = explained(step)
    assert finding.verdict == "micro-batch"
    assert "rank 1 micro-batch 1" in finding.summary
    assert finding.certificate.holds


def test_a_rank_that_holds_the_norm_is_named_although_no_few_rows_do(trainer):
    step = trainer.faulty(trainer.model(), scaled(40.0, rank=1))
    finding = explained(step)
    assert finding.verdict == "rank"
    assert "rank 1 holds" in finding.summary
    assert finding.certificate.holds
    assert finding.certificate.norm_without <= step.limit


@pytest.mark.parametrize("kind", ["group", "data-source"])
def test_rows_of_one_prompt_and_of_one_source_are_named_after_it(trainer, kind):
    """Three rows of three micro-batches that share a prompt, or whose uids begin alike."""
    where = [(0, 0, 1), (0, 1, 2), (1, 0, 3)]

    def change(inputs):
        for rank, number, row in where:
            inputs[rank][number]["advantage"][row] *= 30.0
            if kind == "group":
                for name in ("ids", "attention", "positions"):
                    inputs[rank][number][name][row, :6] = inputs[0][0][name][1, :6]

    step = trainer.faulty(trainer.model(), change)
    if kind == "data-source":
        for rank, batches in enumerate(step.ranks):
            named = [
                tuple(f"{'web' if (rank, number, row) in where else 'math'}/{row}" for row in range(4))
                for number in range(len(batches))
            ]
            step.ranks[rank] = tuple(
                dataclasses.replace(batch, uids=uids) for batch, uids in zip(batches, named, strict=True)
            )
    finding = explained(step)
    assert finding.verdict == kind
    assert {(one.rank, one.micro_batch, one.sequence) for one in finding.culprits} == set(where)
    assert finding.certificate.holds


def test_a_healthy_step_has_no_holder(trainer):
    step = trainer.faulty(trainer.model(), None)
    assert "holds" not in explained(step, limit=0.3 * step.grad_norm).summary
