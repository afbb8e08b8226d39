"""The inference copy: another model in another precision, whose logp are close to the trainer's."""

import torch

from gradloc.demo import task
from gradloc.demo.model import response_logp
from gradloc.demo.rollout import InferenceCopy


def test_the_copy_reports_nearly_what_the_trainer_computes(moment):
    rollouts = moment.rollouts
    with torch.no_grad():
        gap_BR = (response_logp(moment.model, rollouts.ids_BT) - rollouts.logp_BR)[rollouts.mask_BR].abs()
    assert gap_BR.max() < 0.5
    assert 0 < gap_BR.mean() < 0.02, "another precision, so never quite the same"


def test_an_answer_ends_where_the_copy_said_so(moment):
    rollouts = moment.rollouts
    for row in range(len(rollouts.problems)):
        response, mask = rollouts.response(row), rollouts.mask_BR[row].tolist()
        last = response.index(task.EOS) if task.EOS in response else len(response) - 1
        assert mask == [at <= last for at in range(len(response))]
        assert all(token == task.PAD for token in response[last + 1 :])
    assert (rollouts.logp_BR[~rollouts.mask_BR] == 0).all()
    assert (rollouts.logp_BR[rollouts.mask_BR] < 0).all()


def test_the_copy_follows_only_when_it_is_synced(policy):
    copy = InferenceCopy(policy, seed=0)
    before = [parameter.clone() for parameter in copy.model.parameters()]
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.5)
    assert all(torch.equal(a, b) for a, b in zip(before, copy.model.parameters(), strict=True))
    copy.sync(policy)
    for own, theirs in zip(copy.model.parameters(), policy.parameters(), strict=True):
        assert own.dtype == torch.bfloat16
        assert torch.equal(own, theirs.to(torch.bfloat16))


def test_a_tools_token_is_context_and_not_learnt(moment):
    found = moment.copy.resume(moment.rollouts, row=2, at=3, inserted=task.RARE_IDS[0], number=6)
    assert 1 <= len(found) == len({tuple(one.response(2)) for one in found}) <= 6
    rollouts = found[0]
    start = task.PROMPT_LENGTH + 3
    assert torch.equal(rollouts.ids_BT[2, :start], moment.rollouts.ids_BT[2, :start])
    assert rollouts.ids_BT[2, start] == task.RARE_IDS[0]
    assert not rollouts.mask_BR[2, 3] and rollouts.mask_BR[2, 4]
    others = [row for row in range(len(rollouts.problems)) if row != 2]
    assert torch.equal(rollouts.ids_BT[others], moment.rollouts.ids_BT[others])
    assert torch.equal(rollouts.logp_BR[others], moment.rollouts.logp_BR[others])
