"""Cases distilled from public bug reports, each played as a step: the diagnosis gives the expected cause.

What the checks of saved files say of the same inputs: tests/sdk/checks/test_cases.py.
"""

import json
import math
from dataclasses import replace

import pytest
import torch

from gradloc.localization import localize
from gradloc.replay import coefficients_of, replay

ROW, COLUMN = 2, 3  # of rank 1, micro-batch 0: where the trainer's faults strike
AT = (1, 0, ROW, 6 + COLUMN)


@pytest.fixture(scope="module")
def cases(cases_file):
    return {case["id"]: case["input"] for case in json.loads(cases_file.read_text())}


def found_in(step, **facts):
    finding = localize(step.policy(), step.placed, step.facts(**facts))
    json.dumps(json.loads(finding.model_dump_json()), allow_nan=False)
    return finding


def places(finding):
    return [(one.rank, one.micro_batch, one.sequence, one.token) for one in finding.culprits]


def first_place(finding):
    return places(finding)[0]


def behind_the_mask(inputs):
    inputs[1][0]["mask"][ROW, COLUMN] = False


class TestStaleTokenOverflow:
    def log_ratio(self, cases):
        case = cases["stale-token-overflow"]
        return case["logp"][1] - case["rollout_logp"][1]

    def test_the_token_is_named_though_its_ratio_is_infinite_in_the_trainer(self, cases, trainer):
        step = trainer.faulty(trainer.model(), trainer.stale(self.log_ratio(cases)))
        finding = found_in(step)
        assert (finding.verdict, first_place(finding)) == ("non-finite", AT)
        assert (finding.causes[0].name, finding.causes[0].confidence) == ("token-mismatch", "high")
        assert math.isfinite(finding.causes[0].evidence["ratio"])
        assert finding.certificate.holds

    def test_behind_the_mask_it_is_a_mask_fault(self, cases, trainer):
        fault = trainer.together(trainer.stale(self.log_ratio(cases)), behind_the_mask)
        finding = found_in(trainer.faulty(trainer.model(), fault))
        assert (finding.verdict, first_place(finding)) == ("mask", AT)
        assert finding.causes[0].name == "mask-fault"

    def test_behind_the_mask_nobody_is_blamed_where_nothing_was_harmed(self, cases, trainer):
        fault = trainer.together(trainer.stale(self.log_ratio(cases) - 5.0), behind_the_mask)
        finding = found_in(trainer.faulty(trainer.model(), fault))
        assert (finding.verdict, finding.certificate) == ("batch-wide", None)
        assert AT not in places(finding)


class TestMaskedNan:
    def masked(self, cases):
        (at,) = [index for index, value in enumerate(cases["masked-nan"]["old_logp"]) if math.isnan(value)]
        assert not cases["masked-nan"]["label_mask"][at]

    def test_a_norm_that_is_nan_names_the_position(self, cases, trainer):
        self.masked(cases)
        finding = found_in(trainer.faulty(trainer.model(), trainer.together(trainer.stale(math.nan), behind_the_mask)))
        assert (finding.verdict, first_place(finding)) == ("mask", AT)

    def test_a_finite_norm_blames_nobody(self, cases, trainer):
        self.masked(cases)
        step = trainer.faulty(trainer.model(), trainer.together(trainer.all_advantages(20.0), behind_the_mask))
        batch = step.ranks[1][0]
        old_BR = batch.logp_BR.clone()
        old_BR[ROW, COLUMN] = math.nan
        step.ranks[1] = (replace(batch, old_logp_BR=old_BR, rollout_logp_BR=old_BR), *step.ranks[1][1:])
        finding = found_in(step)
        assert (finding.verdict, finding.certificate) == ("batch-wide", None)
        assert AT not in places(finding)
        assert {cause.name for cause in finding.causes} == {"batch-wide"}


def test_a_leave_one_out_advantage_is_an_outlier_and_no_mismatch(cases, trainer):
    rewards = torch.tensor(cases["leave-one-out-advantage"]["rewards"], dtype=torch.float32)
    others = torch.stack([torch.cat([rewards[:at], rewards[at + 1 :]]) for at in range(len(rewards))])
    advantage_N = (rewards - others.mean(dim=1)) / (others.std(dim=1) + 1e-6)

    def fault(inputs):
        for index, one in enumerate(advantage_N.view(2, 4)):
            inputs[1][index]["advantage"] = one[:, None].expand(-1, 12).clone()

    finding = found_in(trainer.faulty(trainer.model(), fault))
    assert (finding.verdict, first_place(finding)[:3]) == ("sequence", (1, 0, 0))
    assert [cause.name for cause in finding.causes if cause.confidence != "low"] == ["advantage-outlier"]
    assert abs(finding.causes[0].evidence["advantage"]) > 1_000 * finding.causes[0].evidence["median_advantage"]


def test_harmless_ratios_that_add_up_are_the_sequences(cases, trainer):
    """The loss weighs a row's tokens by the ratio of the whole row."""
    each, num_tokens = cases["drift-adds-up"]["per_token_log_ratio"], cases["drift-adds-up"]["num_tokens"]

    def fault(inputs):
        batch = inputs[0][0]
        batch["log_ratio"][ROW] = each
        weight = math.exp(each * num_tokens) - math.exp(each)
        batch["extra"][ROW] = -batch["advantage"][ROW] * weight * batch["mask"][ROW]

    shape = {"num_ranks": 1, "num_micro_batches": 1, "num_response": num_tokens, "padding": "left"}
    step = trainer.faulty(trainer.model(), fault, **shape)
    finding = found_in(step, limit=0.9 * step.grad_norm)
    assert (finding.verdict, first_place(finding)[:3]) == ("sequence", (0, 0, ROW))
    assert (finding.causes[0].name, finding.causes[0].confidence) == ("sequence-mismatch", "high")
    assert finding.causes[0].evidence["ratio"] == pytest.approx(3.32, abs=0.01)


def test_a_reward_that_is_missing_is_the_cause_of_what_its_group_became(cases, trainer):
    rewards = torch.tensor([math.nan if one is None else one for one in cases["none-reward"]["rewards"]])
    advantage_B = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    def fault(inputs):
        inputs[1][0]["advantage"] = advantage_B[:, None].expand(-1, 12).clone()

    finding = found_in(trainer.faulty(trainer.model(), fault))
    assert finding.verdict == "non-finite"
    assert {(one.rank, one.micro_batch) for one in finding.culprits} == {(1, 0)}
    assert (finding.causes[0].name, finding.causes[0].confidence) == ("non-finite-advantage", "high")
    assert "reward" in finding.causes[0].summary


def test_other_ids_of_the_same_text_are_retokenization(cases, trainer):
    case = cases["retokenized-turn"]
    trained, sampled = (10, 11, 12), (20, 21, 22)
    texts = dict(zip((*trained, *sampled), (*case["trained_text"], *case["sampled_text"]), strict=True))

    def fault(inputs):
        batch = inputs[1][0]
        batch["ids"][ROW, 6:9] = torch.tensor(trained)
        batch["log_ratio"][ROW, 0] = 8.0

    step = trainer.faulty(trainer.model(), fault)
    batch = step.ranks[1][0]
    rollout_ids_BR = batch.ids_BT[:, 6:].clone()
    rollout_ids_BR[ROW, :3] = torch.tensor(sampled)
    step.ranks[1] = (replace(batch, rollout_ids_BR=rollout_ids_BR), *step.ranks[1][1:])
    finding = localize(step.policy(), step.placed, step.facts(), texts=lambda one: texts.get(one, f"w{one}"))
    assert finding.causes[0].name == "retokenization"
    assert finding.culprits[0].token == 6 + case_first(case)


def case_first(case):
    """The first trained id that was not sampled."""
    pairs = zip(case["trained_ids"], case["sampled_ids"], strict=True)
    return next(at for at, (own, theirs) in enumerate(pairs) if own != theirs)


def test_a_temperature_of_the_sampler_alone_is_nobodys_fault(cases, trainer):
    temperature = cases["temperature-not-applied"]["temperature"]
    model = trainer.model(tied=False)
    with torch.no_grad():
        model.lm_head.weight.mul_(12.0)  # a policy that is sure of something
    answers = {}

    def answered(inputs):
        """Answers sampled at that temperature, with the log-probabilities of it."""
        generator = torch.Generator().manual_seed(3)
        for batch in (batch for batches in inputs for batch in batches):
            for at in range(6, 18):
                with torch.no_grad():
                    logits = model(input_ids=batch["ids"][:, :at]).logits[:, -1] / temperature
                batch["ids"][:, at] = torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]
            with torch.no_grad():
                logits = model(input_ids=batch["ids"]).logits[:, 5:-1]
            ids_BR1 = batch["ids"][:, 6:, None]
            ratio = [(logits / t).log_softmax(-1).gather(-1, ids_BR1)[..., 0] for t in (1.0, temperature)]
            batch["mask"][:], batch["attention"][:] = True, True
            batch["positions"] = torch.arange(18).expand(len(batch["ids"]), -1)
            batch["log_ratio"] = ratio[0] - ratio[1]
            answers["worst"] = max(answers.get("worst", 0.0), float(batch["log_ratio"].abs().max()))

    step = trainer.step(model, fault=answered)
    assert answers["worst"] > math.log(2)
    finding = found_in(step, limit=0.5 * step.grad_norm, healthy_norm=0.1 * step.grad_norm)
    assert (finding.causes[0].name, finding.causes[0].confidence) == ("systematic-mismatch", "high")
    assert finding.causes[0].evidence["temperature"] == pytest.approx(temperature, rel=0.2)
    assert (finding.verdict, finding.certificate) == ("batch-wide", None)


def test_ratios_before_any_update_are_mask_positions_or_padding(cases, trainer):
    case = cases["ratio-before-any-update"]

    def fault(inputs):
        for batch in (batch for batches in inputs for batch in batches):
            batch["log_ratio"] = case["log_ratio_abs_mean"] * batch["log_ratio"].sign()
        trainer.all_advantages(20.0)(inputs)

    step = trainer.faulty(trainer.model(), fault)
    cause = found_in(step, metrics={"lr": case["learning_rate"]}).causes[0]
    assert (cause.name, cause.confidence) == ("ratio-before-update", "high")
    assert "position_ids" in cause.summary
    assert found_in(step, metrics={"lr": 1e-6}).causes[0].name == "batch-wide", "an inexact copy"


def test_a_head_that_takes_over_is_a_layers_alarm_under_a_harmless_norm(cases, trainer):
    now, before = cases["head-takes-over"]["layer_norms_now"], cases["head-takes-over"]["layer_norms_healthy"]
    step = trainer.step(trainer.model(tied=False))
    grown = now["lm_head"] / before["lm_head"]
    healthy = step.layer_norms | {"head": step.layer_norms["head"] / grown}
    finding = found_in(step, healthy_layer_norms=healthy, healthy_norm=0.4 * step.grad_norm, limit=4 * step.grad_norm)
    assert (finding.verdict, finding.layers_exploding) == ("layer", ("head",))
    assert finding.causes[0].name == "layer-growth"
    assert finding.causes[0].evidence["growth_max"] == pytest.approx(grown)


def test_a_loss_that_was_not_divided_is_accounting(cases, trainer):
    assert cases["zero-token-count"]["num_valid_tokens_reported"] == 0
    healthy = trainer.step(trainer.model())
    num_tokens = sum(placed.batch.num_tokens for placed in healthy.placed)

    def fault(inputs):
        for batch in (batch for batches in inputs for batch in batches):
            ratio = batch["log_ratio"].exp()
            batch["extra"] = -batch["advantage"] * ratio * batch["mask"] * (num_tokens - 1)

    finding = found_in(trainer.faulty(trainer.model(), fault))
    assert (finding.verdict, finding.causes[0].name) == ("accounting", "unnormalised-loss")
    assert finding.fix.norm_after == pytest.approx(healthy.grad_norm, rel=1e-3)


def test_all_cases_are_played(cases):
    assert cases.keys() == {
        "stale-token-overflow", "masked-nan", "leave-one-out-advantage", "drift-adds-up", "none-reward",
        "retokenized-turn", "temperature-not-applied", "ratio-before-any-update", "head-takes-over", "zero-token-count",
    }  # fmt: skip


def test_equal_rewards_in_all_groups_teach_nothing(trainer):
    """No case has it; the gradient vanishes, and that is why."""
    step = trainer.faulty(trainer.model(), trainer.all_advantages(0.0))
    finding = found_in(step)
    assert (finding.causes[0].name, finding.causes[0].confidence) == ("zero-variance-groups", "high")


def test_a_reference_policy_that_disagrees_makes_a_kl_outlier(trainer):
    """k3's gradient is beta (1 - exp(ref - logp))."""
    beta, gap = 0.1, 9.0
    step = trainer.faulty(trainer.model(), trainer.extra(beta * (1 - math.exp(gap))))
    batch = step.ranks[1][0]
    ref_BR = batch.logp_BR.clone()
    ref_BR[ROW, COLUMN] += gap
    step.ranks[1] = (replace(batch, ref_logp_BR=ref_BR), *step.ranks[1][1:])
    finding = found_in(step)
    assert (finding.verdict, first_place(finding)) == ("token", AT)
    assert (finding.causes[0].name, finding.causes[0].confidence) == ("kl-outlier", "high")
    assert finding.certificate.holds


def test_a_norm_that_overflowed_says_where_to_add_up(trainer):
    step = trainer.faulty(trainer.model(), trainer.all_advantages(1e21))
    gradient = replay(step.policy(), step.placed, coefficients_of(step.placed)).gradient
    assert gradient.is_finite
    finding = found_in(step, grad_norm=math.inf, layer_norms={})
    assert (finding.verdict, finding.causes[0].name, finding.causes[0].confidence) == (
        "norm-overflow",
        "norm-overflow",
        "high",
    )
