"""The faults are real mechanisms: what they do to a moment, measured."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradloc.demo import cancellation, faults, nucleus, older_policy, pretraining, stale_cache, task
from gradloc.demo.answer_key import ShuffledKey
from gradloc.demo.bit_flip import FlippedBit
from gradloc.demo.cancellation import NUM_BLOCKS, RESIDUAL_RMS, LayerExplosion
from gradloc.demo.grpo import advantages, token_losses
from gradloc.demo.leave_one_out import RewardOutlier, leave_one_out
from gradloc.demo.model import load_weights, new_model, response_logp
from gradloc.demo.moment import Fault
from gradloc.demo.nucleus import ZeroProbability
from gradloc.demo.older_policy import SequenceMismatch
from gradloc.demo.recycled_buffer import MaskedNan
from gradloc.demo.retokenization import Retokenized, encoded_again
from gradloc.demo.settings import GROUP_SIZE, LEARNING_RATE, rewards_of
from gradloc.demo.stale_cache import TokenMismatch, TwoMismatches
from gradloc.demo.supervised_rate import SupervisedRate
from gradloc.demo.temperature import OtherTemperature
from gradloc.demo.token_count import EmptyWindow
from gradloc.demo.weak_copy import STEPS_BEHIND, WeakCopy


def test_an_unknown_fault_is_refused_by_name(tmp_path: Path):
    with pytest.raises(ValueError, match="unknown fault 'gremlin'; expected one of token-mismatch, layer, none"):
        faults.named("gremlin", 1, 2, tmp_path)


def test_no_fault_changes_nothing(moment):
    fault = Fault()
    assert fault.strike(moment) is moment.rollouts
    assert fault.struck_at is None


def test_a_stale_cache_is_scored_against_the_slots_previous_occupant(moment):
    stale_BR = stale_cache.stale_logp(moment.copy, moment.previous, moment.rollouts)
    row, at = 5, 4
    position = task.PROMPT_LENGTH + at
    mixed = torch.cat(
        [moment.previous.ids_BT[row, : position - 1], moment.rollouts.ids_BT[row, position - 1 : position]]
    )
    alone_V = moment.copy.log_probs_after(mixed[None])[0]
    torch.testing.assert_close(stale_BR[row, at], alone_V[moment.rollouts.ids_BT[row, position]], rtol=0.05, atol=0.05)


def test_a_mismatch_is_one_tokens_logp_and_nothing_else(moment, tmp_path: Path):
    fault = TokenMismatch(seed=1, world_size=1, judge_dir=tmp_path)
    rollouts = fault.strike(moment_at(moment, 40))
    assert fault.struck_at == 40
    changed = torch.nonzero(rollouts.logp_BR != moment.rollouts.logp_BR).tolist()
    assert len(changed) == 1
    row, at = changed[0]
    assert moment.rollouts.mask_BR[row, at]
    assert rollouts.logp_BR[row, at] < moment.rollouts.logp_BR[row, at] - 3
    assert torch.equal(rollouts.ids_BT, moment.rollouts.ids_BT)
    fault.testify(0, moment.model, [])
    assert (tmp_path / "planted.json").exists()


def test_a_fault_strikes_once_and_never_early(moment, tmp_path: Path):
    fault = TokenMismatch(seed=1, world_size=1, judge_dir=tmp_path)
    assert fault.strike(moment_at(moment, 5)) is moment.rollouts
    fault.strike(moment_at(moment, 40))
    assert fault.strike(moment_at(moment, 41)) is moment.rollouts
    assert fault.struck_at == 40


def test_the_planted_row_makes_the_stream_nearly_cancel(moment, tmp_path: Path):
    fault = LayerExplosion(seed=1, world_size=1, judge_dir=tmp_path)
    before = moment.model.get_input_embeddings().weight.detach().clone()
    rollouts = fault.strike(moment_at(moment, 40))
    assert fault.struck_at == 40, "no place among those of one step"
    changed = torch.nonzero((moment.model.get_input_embeddings().weight != before).any(dim=1)).flatten().tolist()
    assert len(changed) == 1 and changed[0] in task.RARE_IDS
    row, position = torch.nonzero(rollouts.ids_BT == changed[0]).tolist()[0]
    with torch.no_grad():
        states = moment.model(
            input_ids=rollouts.ids_BT[row : row + 1], use_cache=False, output_hidden_states=True
        ).hidden_states
    rms_KT = torch.stack([state[0].square().mean(dim=-1).sqrt() for state in states])
    usual_K = rms_KT[:, task.PROMPT_LENGTH : position].median(dim=1).values
    assert rms_KT[NUM_BLOCKS, position] == pytest.approx(RESIDUAL_RMS, rel=0.2)
    assert rms_KT[NUM_BLOCKS, position] < usual_K[NUM_BLOCKS] / 200
    for block in (0, 1, NUM_BLOCKS + 1, NUM_BLOCKS + 2):
        assert rms_KT[block, position] > usual_K[block] / 20
    with torch.no_grad():
        gap_R = (response_logp(moment.model, rollouts.ids_BT[row : row + 1]) - rollouts.logp_BR[row : row + 1])[0]
    at = fault._planted["token"] - task.PROMPT_LENGTH
    assert abs(float(gap_R[at])) <= cancellation.LOG_RATIO_MAX + 0.05, "the importance weight is not the story"


def moment_at(moment, step: int):
    return replace(moment, step=step)


def test_an_older_policys_answer_is_harmless_token_by_token_and_not_as_a_whole(moment, checkpoint, tmp_path: Path):
    fault = SequenceMismatch(seed=1, world_size=1, judge_dir=tmp_path)
    for step in range(40, 60):
        rollouts = fault.strike(replace(moment, step=step, checkpoint=checkpoint))
        if fault.struck_at is not None:
            break
    assert fault.struck_at is not None, "no answer in twenty steps"
    (row,) = torch.nonzero((rollouts.logp_BR != moment.rollouts.logp_BR).any(dim=1)).flatten().tolist()
    with torch.no_grad():
        gap_R = response_logp(moment.model, rollouts.ids_BT[row : row + 1])[0] - rollouts.logp_BR[row]
    gap_R = gap_R[rollouts.mask_BR[row]]
    assert gap_R.abs().max() <= math.log(older_policy.TOKEN_RATIO_MAX) + 1e-4
    assert gap_R.sum() > math.log(8)
    older = new_model(0)
    load_weights(older, checkpoint)
    with torch.no_grad():
        truthful_R = response_logp(older, rollouts.ids_BT[row : row + 1])[0]
    assert (truthful_R - rollouts.logp_BR[row])[rollouts.mask_BR[row]].abs().max() < 0.5, "it reports what it computes"


def test_leave_one_out_of_a_group_that_varies_is_an_ordinary_advantage():
    rewards_G = torch.tensor([0.1, 0.4, 1.0, 0.2, 0.3, 0.9, 0.5, 0.6])
    found_G = leave_one_out(rewards_G)
    others = rewards_G[1:]
    assert found_G[0] == pytest.approx(float((rewards_G[0] - others.mean()) / others.std()), rel=1e-2)
    assert found_G.abs().max() < 4


def test_seven_equal_rewards_give_the_eighth_an_absurd_advantage(moment, tmp_path: Path):
    fault = RewardOutlier(seed=1, world_size=1, judge_dir=tmp_path)
    rollouts = fault.strike(moment_at(moment, 40))
    rewards_B = rewards_of(rollouts)
    advantage_B = fault.advantages(40, rewards_B)
    worst = int(advantage_B.abs().argmax())
    planted = fault._planted
    assert (planted["micro_batch"], planted["sequence"]) == (worst // 8, worst % 8)
    group = rollouts.ids_BT[worst // 8 * 8 : worst // 8 * 8 + 8]
    assert len({tuple(row) for row in group.tolist()}) == 2
    assert advantage_B.abs().max() > 100 > 5 > advantage_B.abs().sort().values[-2]
    assert torch.equal(fault.advantages(41, rewards_B), advantages(rewards_B, GROUP_SIZE)), "at its step only"


def test_a_nucleus_keeps_the_fewest_tokens_that_hold_enough():
    filtered_V = nucleus.nucleus_log_probs(torch.tensor([0.6, 0.3, 0.08, 0.02]).log())
    torch.testing.assert_close(filtered_V.exp(), torch.tensor([0.6 / 0.98, 0.3 / 0.98, 0.08 / 0.98, 0.0]))


def test_a_token_outside_the_nucleus_has_probability_zero(moment, tmp_path: Path):
    fault = ZeroProbability(seed=1, world_size=1, judge_dir=tmp_path)
    rollouts = fault.strike(moment_at(moment, 40))
    (place,) = torch.nonzero(torch.isinf(rollouts.logp_BR)).tolist()
    assert rollouts.mask_BR[tuple(place)]
    assert moment.rollouts.logp_BR[tuple(place)] < math.log(1 - nucleus.TOP_P)


def test_a_recycled_buffer_keeps_one_nan_where_the_mask_is_zero(moment, tmp_path: Path):
    fault = MaskedNan(seed=1, world_size=1, judge_dir=tmp_path)
    rollouts = fault.strike(moment_at(moment, 40))
    old_BR = torch.full_like(rollouts.logp_BR, -1.0)
    (place,) = torch.nonzero(torch.isnan(fault.old_logp(40, old_BR, rollouts.mask_BR))).tolist()
    assert not rollouts.mask_BR[tuple(place)]
    logp_BR = old_BR.clone().requires_grad_(True)
    losses_BR = token_losses(
        logp_BR,
        fault.old_logp(40, old_BR, rollouts.mask_BR),
        old_BR,
        torch.ones(len(old_BR)),
        rollouts.mask_BR,
    )
    assert torch.isfinite(losses_BR).all()
    (derivative_BR,) = torch.autograd.grad(losses_BR.sum(), logp_BR)
    assert torch.nonzero(~torch.isfinite(derivative_BR)).tolist() == [place]
    assert torch.isfinite(fault.old_logp(41, old_BR, rollouts.mask_BR)).all()


def test_an_answer_encoded_again_is_the_same_text_and_other_ids(moment, tmp_path: Path):
    assert encoded_again([task.ID_OF["1"], task.ID_OF["7"], task.EOS]) == [
        task.ID_OF[task.BLANK],
        task.ID_OF["1"],
        task.ID_OF["7"],
        task.EOS,
    ]
    fault = Retokenized(seed=1, world_size=1, judge_dir=tmp_path)
    rng = np.random.default_rng(3)
    for step in range(40, 60):
        again = moment.copy.sample(tuple(task.problem(int(i)) for i in rng.choice(99, 4) for _ in range(GROUP_SIZE)))
        rollouts = fault.strike(replace(moment, step=step, rollouts=again))
        if fault.struck_at is not None:
            break
    assert fault.struck_at is not None, "no answer in twenty steps"
    (row,) = torch.nonzero((rollouts.ids_BT != again.ids_BT).any(dim=1)).flatten().tolist()
    assert torch.equal(rollouts.sampled, again.ids_BT[:, task.PROMPT_LENGTH :])
    assert torch.equal(rollouts.logp_BR[row], again.logp_BR[row]), "what was reported stays where it was"
    assert torch.equal(fault.rewards(fault.struck_at, rollouts), rewards_of(again)), "the text is what is judged"


def test_another_temperature_moves_every_token(moment, tmp_path: Path):
    fault = OtherTemperature(seed=1, world_size=1, judge_dir=tmp_path)
    assert fault.strike(moment_at(moment, 5)) is moment.rollouts
    rollouts = fault.strike(moment_at(moment, 40))
    gap_BR = (rollouts.logp_BR - moment.rollouts.logp_BR)[moment.rollouts.mask_BR]
    assert (gap_BR.abs() > 1e-3).float().mean() > 0.8
    likely_BR = moment.rollouts.logp_BR[moment.rollouts.mask_BR] > math.log(0.7)
    assert gap_BR[likely_BR].mean() > 0 > gap_BR[~likely_BR].mean(), "sharper"


def test_faults_of_everybody_change_what_they_say_and_nothing_before(moment, tmp_path: Path):
    window, rate, key = (kind(1, 2, tmp_path) for kind in (EmptyWindow, SupervisedRate, ShuffledKey))
    mask_BR = moment.rollouts.mask_BR
    for fault in (window, rate, key):
        fault.strike(moment_at(moment, 5))
    assert (window.counted(5, mask_BR) is mask_BR, rate.learning_rate(5)) == (True, LEARNING_RATE)
    assert torch.equal(key.rewards(5, moment.rollouts), rewards_of(moment.rollouts))
    for fault in (window, rate, key):
        fault.strike(moment_at(moment, 40))
    assert int(window.counted(40, mask_BR).sum()) == 0
    assert window.counted(41, mask_BR) is mask_BR
    assert rate.learning_rate(41) == pretraining.LEARNING_RATE > 10 * LEARNING_RATE
    assert key.rewards(41, moment.rollouts).mean() < 0.5 * rewards_of(moment.rollouts).mean()


def test_one_bit_of_one_gradient_flips_on_one_rank(moment, tmp_path: Path):
    changed = []
    for rank in range(2):
        fault = FlippedBit(seed=1, world_size=2, judge_dir=tmp_path)
        fault.strike(replace(moment, step=40, rank=rank))
        for parameter in moment.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        fault.reduced(41, moment.model)
        assert all((parameter.grad == 1e-3).all() for parameter in moment.model.parameters())
        fault.reduced(40, moment.model)
        values = torch.cat([parameter.grad.flatten() for parameter in moment.model.parameters()])
        changed.append(values[values != 1e-3])
    assert sorted(len(values) for values in changed) == [0, 1]
    (value,) = torch.cat(changed).tolist()
    assert math.isfinite(value) and value > 1e30


def test_a_weak_copy_is_four_steps_behind_and_has_eight_bits(policy):
    copy = WeakCopy(policy, seed=1)
    first = next(policy.parameters()).detach().clone()
    for step in range(2 * STEPS_BEHIND):
        copy.sync(policy)
        own = next(copy.model.parameters()).float()
        age = min(step, STEPS_BEHIND)
        torch.testing.assert_close(own, first + 0.25 * (step - age), rtol=0.07, atol=0.02)
        assert len(torch.unique(own)) <= 256
        with torch.no_grad():
            next(policy.parameters()).add_(0.25)


def test_two_mismatches_are_one_on_each_rank(moment, tmp_path: Path):
    places = []
    for rank in range(2):
        fault = TwoMismatches(seed=1, world_size=2, judge_dir=tmp_path)
        fault.growth_max = math.inf
        rollouts = fault.strike(replace(moment, step=40, rank=rank))
        places += [(rank, *place) for place in torch.nonzero(rollouts.logp_BR != moment.rollouts.logp_BR).tolist()]
    assert [place[0] for place in places] == [0, 1]
    assert places[0][1:] != places[1][1:]
