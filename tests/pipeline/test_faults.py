"""The faults are real mechanisms: what they do to a moment, measured."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradloc.demo import cancellation, faults, stale_cache, task
from gradloc.demo.cancellation import NUM_BLOCKS, RESIDUAL_RMS, LayerExplosion
from gradloc.demo.model import response_logp
from gradloc.demo.moment import Fault
from gradloc.demo.stale_cache import TokenMismatch


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
