"""Rollback: which checkpoint is the last healthy one, what the plan says, and when there is none."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc.rollback import Checkpoint, Rollback, RollbackPlan, last_healthy


def rollback_in(folder: Path, plans: list[RollbackPlan], **settings: int) -> Rollback:
    made = Rollback(plans.append, audit_path=folder / "rollbacks.jsonl", clock=lambda: 7.0, **settings)
    for step in range(0, 101, 20):
        made.checkpoint_saved(step, f"/checkpoints/{step}")
    return made


def recorded(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rollbacks.jsonl").read_text().splitlines()]


def test_back_to_the_last_checkpoint_with_healthy_steps_behind_it(tmp_path: Path) -> None:
    plans: list[RollbackPlan] = []
    rollback = rollback_in(tmp_path, plans)
    for step in range(110):
        rollback.step_observed(step, "snapshot" if step in (63, 108) else "go")
    plan = rollback.propose(108, reason="spike", skip_uids=["a", 5])
    assert plan is not None and plans == [plan]
    assert plan.checkpoint == Checkpoint(100, "/checkpoints/100")
    assert (plan.skip_first, plan.skip_last, plan.skip_uids) == (100, 118, ("a", "5"))
    (record,) = recorded(tmp_path)
    assert record["action"] == "proposed" and record["text"] == plan.summary


def test_a_checkpoint_right_after_a_bad_step_is_passed_over(tmp_path: Path) -> None:
    plans: list[RollbackPlan] = []
    rollback = rollback_in(tmp_path, plans)
    rollback.step_observed(95, "skip")
    plan = rollback.propose(105, reason="spike")
    assert plan is not None and plan.checkpoint.step == 80
    assert (plan.skip_first, plan.skip_last) == (95, 115)


@pytest.mark.parametrize(
    ("norm", "spikes", "said"),
    [
        (900.0, True, "spikes from the earlier weights too (norm 900, limit 2): the data is at fault"),
        (0.4, False, "does not spike from the earlier weights (norm 0.4, limit 2)"),
        (math.nan, True, "spikes from the earlier weights too"),
    ],
)
def test_the_plan_says_whether_the_culprit_spikes_from_the_earlier_weights(
    tmp_path: Path, norm: float, spikes: bool, said: str
) -> None:
    plans: list[RollbackPlan] = []
    measured: list[Checkpoint] = []

    def norm_from(checkpoint: Checkpoint) -> float:
        measured.append(checkpoint)
        return norm

    plan = rollback_in(tmp_path, plans).propose(105, reason="spike", limit=2.0, norm_from=norm_from)
    assert plan is not None and measured == [plan.checkpoint]
    assert plan.spikes_from_checkpoint is spikes
    assert said in plan.summary
    assert said in str(recorded(tmp_path)[0]["text"])


def test_a_measurement_that_fails_or_is_missing_is_said_and_does_not_stop_the_rescue(tmp_path: Path) -> None:
    def broken(_checkpoint: Checkpoint) -> float:
        raise OSError("checkpoint unreadable")

    plan = rollback_in(tmp_path, []).propose(105, reason="spike", limit=2.0, norm_from=broken)
    assert plan is not None and plan.spikes_from_checkpoint is None
    assert "was not measured" in plan.summary


def test_without_a_healthy_checkpoint_nothing_is_called_and_that_is_recorded(tmp_path: Path) -> None:
    plans: list[RollbackPlan] = []
    rollback = Rollback(plans.append, audit_path=tmp_path / "rollbacks.jsonl")
    assert rollback.propose(5, reason="spike") is None
    assert plans == []
    assert recorded(tmp_path)[0]["action"] == "refused"


def test_rollbacks_are_limited(tmp_path: Path) -> None:
    plans: list[RollbackPlan] = []
    rollback = rollback_in(tmp_path, plans, rollbacks_max=2)
    for _ in range(5):
        rollback.propose(105, reason="spike")
    assert len(plans) == rollback.num_rollbacks == 2
    assert [one["action"] for one in recorded(tmp_path)] == ["proposed", "proposed", "refused", "refused", "refused"]
    assert "a human must look" in str(recorded(tmp_path)[-1]["text"])


def test_what_was_undone_does_not_count_any_more(tmp_path: Path) -> None:
    rollback = rollback_in(tmp_path, [])
    rollback.step_observed(95, "snapshot")
    rollback.propose(95, reason="spike")
    rollback.checkpoint_saved(100, "/checkpoints/100-again")
    assert rollback.last_healthy(105) == Checkpoint(100, "/checkpoints/100-again")


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 50)), st.integers(0, 50), st.integers(0, 10))
def test_the_checkpoint_is_never_after_the_spike_nor_after_a_bad_step(
    saved: list[int], bad: list[int], before: int, healthy: int
) -> None:
    found = last_healthy([Checkpoint(step, "") for step in saved], bad, before, healthy)
    if found is not None:
        assert found.step <= before
        assert not any(found.step - healthy <= step < found.step for step in bad)


def test_settings_that_cannot_be_meant_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        Rollback(lambda plan: None, audit_path=tmp_path / "x", skip_after=-1)
    with pytest.raises(ValueError, match="at least 1"):
        Rollback(lambda plan: None, audit_path=tmp_path / "x", rollbacks_max=0)
