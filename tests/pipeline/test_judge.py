"""The judge's exact shares, against one backward a token."""

from pathlib import Path

import pytest
import torch

from gradloc.demo import testimony
from gradloc.demo.grpo import advantages, token_losses
from gradloc.demo.judge import products, truth_of, verdict_on
from gradloc.demo.model import response_logp
from gradloc.demo.settings import GROUP_SIZE, rewards_of
from gradloc.demo.task import PROMPT_LENGTH


def micro_batches(moment, num_parts: int = 2) -> list[dict[str, torch.Tensor]]:
    """The moment's first rows as a rank would keep them."""
    rollouts = moment.rollouts
    num_rows = 2 * GROUP_SIZE
    with torch.no_grad():
        old_logp_BR = response_logp(moment.model, rollouts.ids_BT[:num_rows])
    whole = {
        "ids_BT": rollouts.ids_BT[:num_rows],
        "mask_BR": rollouts.mask_BR[:num_rows],
        "rollout_logp_BR": rollouts.logp_BR[:num_rows],
        "old_logp_BR": old_logp_BR,
        "advantage_B": advantages(rewards_of(rollouts), GROUP_SIZE)[:num_rows],
    }
    chunks = {name: tensor.chunk(num_parts) for name, tensor in whole.items()}
    return [{name: parts[index] for name, parts in chunks.items()} for index in range(num_parts)]


def losses(model, part: dict[str, torch.Tensor]) -> torch.Tensor:
    return token_losses(
        response_logp(model, part["ids_BT"]),
        part["old_logp_BR"],
        part["rollout_logp_BR"],
        part["advantage_B"],
        part["mask_BR"],
    )


def test_products_equal_one_backward_a_token(moment):
    model, part = moment.model, micro_batches(moment)[0]
    parameters = list(model.parameters())
    direction = [torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) for parameter in parameters]
    found_BR = products(model, losses(model, part), direction)
    losses_BR = losses(model, part)
    for row, at in [(0, 0), (3, 5), (7, 8)]:
        gradient = torch.autograd.grad(losses_BR[row, at], parameters, retain_graph=True)
        expected = sum((g * v).sum() for g, v in zip(gradient, direction, strict=True))
        torch.testing.assert_close(found_BR[row, at], expected, rtol=1e-3, atol=1e-4)


def test_the_judge_names_the_token_whose_weight_is_wrong(moment, tmp_path: Path):
    parts = micro_batches(moment)
    learnt = (parts[1]["advantage_B"].abs() > 0.5)[:, None] & parts[1]["mask_BR"] & (parts[1]["old_logp_BR"] < -0.5)
    row, at = torch.nonzero(learnt)[0].tolist()
    parts[1]["rollout_logp_BR"] = parts[1]["rollout_logp_BR"].clone()
    parts[1]["rollout_logp_BR"][row, at] -= 9.0
    testimony.write_batch(tmp_path, 0, [parts[0]])
    testimony.write_batch(tmp_path, 1, [parts[1]])
    testimony.write_weights(tmp_path, moment.model)
    testimony.write_planted(tmp_path, {"step": 25})
    kept = testimony.read(tmp_path, 2)
    assert kept is not None
    truth = truth_of(kept)
    prompt_length = parts[1]["ids_BT"].shape[1] - parts[1]["mask_BR"].shape[1]
    assert truth.place == (1, 0, row, prompt_length + at)
    assert truth.share > 0.9 > truth.runner_up_share
    assert truth.sum_of_shares == pytest.approx(1.0, abs=1e-3)


def keep(folder: Path, model, parts: list[dict[str, torch.Tensor]], **planted: object) -> testimony.Testimony:
    """The parts as two ranks' testimony, read again."""
    testimony.write_batch(folder, 0, [parts[0]])
    testimony.write_batch(folder, 1, [parts[1]])
    testimony.write_weights(folder, model)
    testimony.write_planted(folder, {"step": 25, **planted})
    kept = testimony.read(folder, 2)
    assert kept is not None
    return kept


def learnt_places(part: dict[str, torch.Tensor]) -> list[list[int]]:
    learnt_BR = (part["advantage_B"].abs() > 0.5)[:, None] & part["mask_BR"] & (part["old_logp_BR"] < -0.5)
    return torch.nonzero(learnt_BR).tolist()


def test_of_two_culprits_the_second_is_the_largest_of_what_the_first_leaves(moment, tmp_path: Path):
    parts = micro_batches(moment)
    places = []
    for rank, part in enumerate(parts):
        row, at = learnt_places(part)[0]
        part["rollout_logp_BR"] = part["rollout_logp_BR"].clone()
        part["rollout_logp_BR"][row, at] -= 9.0 if rank else 6.0
        places.append({"rank": rank, "micro_batch": 0, "sequence": row, "token": PROMPT_LENGTH + at})
    document = verdict_on(keep(tmp_path, moment.model, parts, kind="tokens"))
    assert document["tokens"] == [places[1], places[0]]


def test_copies_of_one_answer_are_tied(moment, tmp_path: Path):
    parts = micro_batches(moment)
    row, at = learnt_places(parts[0])[0]
    copy = (row + 1) % len(parts[0]["mask_BR"])
    for name, tensor in parts[0].items():
        parts[0][name] = tensor.clone()
        if name == "rollout_logp_BR":
            parts[0][name][row, at] -= 9.0
        parts[0][name][copy] = parts[0][name][row].clone()
    document = verdict_on(keep(tmp_path, moment.model, parts))
    named = [{key: place[key] for key in ("sequence", "token")} for place in (document, *document["tied"])]
    assert sorted(named, key=str) == [{"sequence": one, "token": PROMPT_LENGTH + at} for one in sorted((row, copy))]


def test_a_sequence_is_judged_by_the_sum_of_its_tokens_under_the_runs_own_loss(moment, tmp_path: Path):
    parts = micro_batches(moment)
    row, _ = learnt_places(parts[0])[0]
    parts[0]["rollout_logp_BR"] = parts[0]["rollout_logp_BR"].clone()
    parts[0]["rollout_logp_BR"][row] -= 0.5
    document = verdict_on(keep(tmp_path, moment.model, parts, kind="sequence", by_sequence=True))
    assert (document["rank"], document["micro_batch"], document["sequence"]) == (0, 0, row)
    assert document["share"] > 0.7 > document["runner_up_share"]
    assert "token" not in document


@pytest.mark.parametrize("masked", [False, True])
def test_a_loss_that_is_not_finite_at_one_token_names_that_token(moment, tmp_path: Path, masked: bool):
    parts = micro_batches(moment)
    places = torch.nonzero(~parts[1]["mask_BR"]).tolist() if masked else learnt_places(parts[1])
    row, at = places[0]
    name, value = ("old_logp_BR", torch.nan) if masked else ("rollout_logp_BR", -torch.inf)
    parts[1][name] = parts[1][name].clone()
    parts[1][name][row, at] = value
    document = verdict_on(keep(tmp_path, moment.model, parts, kind="non-finite"))
    assert document == {"step": 25, "rank": 1, "micro_batch": 0, "sequence": row, "token": PROMPT_LENGTH + at}


def test_where_nobody_is_to_blame_the_judge_names_nobody(moment, tmp_path: Path):
    kept = keep(tmp_path, moment.model, micro_batches(moment), kind="no token")
    assert verdict_on(kept) == {"step": 25}
    kept = keep(tmp_path, moment.model, micro_batches(moment), kind="rank", rank=1)
    assert verdict_on(kept) == {"step": 25, "rank": 1}


def test_without_a_fault_there_is_nothing_to_judge(tmp_path: Path):
    assert testimony.read(tmp_path, 2) is None
