"""SmolLM2-135M on answers it sampled: one token made stale, its share against an independent float64 oracle.

8 answers of 12 tokens to arithmetic prompts, group-normalised advantages, ratios of the trained policy to a bf16
inference copy.
A gradient is linear in its coefficients, so that of a spike is put together from two replays: of the healthy step,
and of the planted token alone; the oracle does the same in float64, with autograd and none of the code under test.
Shapes: B rows, T positions, R positions with a logp.
"""

import copy
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradloc.culprits import Scene, verified_top
from gradloc.demo.smollm2 import load
from gradloc.policy import Meter, PlacedBatch, Policy, place
from gradloc.replay import Gradient, coefficients_of, gradient_of, replay
from gradloc.snapshot import MicroBatch
from gradloc.verification import Place

SUMS = ((17, 25), (48, 36), (71, 15), (12, 39))  # of equal length in tokens: no padding
NUM_ANSWERS = 2  # each
NUM_NEW_TOKENS = 12
NUM_ROWS = 4  # of a micro-batch
TIMES = (1.2, 1.8, 5.3, 100.0, 5000.0)
NUM_PLACES = 4
DTYPES: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def measured(seed: int, dtypes: Sequence[str], resume: Path | None, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """One entry a planted token, size and number format."""
    lines = resume.read_text().splitlines() if resume is not None and resume.exists() else []
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    known = {(one["dtype"], one["place"], one["times"]) for one in found}
    model, tokenizer, _ = load()
    model.eval().requires_grad_(True)
    torch.manual_seed(seed)
    placed = _batches(model, tokenizer)
    say(
        "sampled: " + " | ".join(tokenizer.decode(row[-NUM_NEW_TOKENS:]).strip()[:20] for row in placed[0].batch.ids_BT)
    )
    places = _places(placed, seed)
    missing = [name for name in dtypes if any((name, n, t) not in known for n in range(len(places)) for t in TIMES)]
    if not missing:
        return found
    oracle = _Oracle(model, placed, places)
    say(f"oracle: healthy norm {oracle.norm:.4g}, unit norms {[round(u, 2) for u in oracle.unit_norms]}")
    for dtype in missing:
        for one in _cases(model, placed, places, oracle, dtype, known):
            found.append(one)
            say(json.dumps(one))
            if resume is not None:
                with resume.open("a") as file:
                    file.write(json.dumps(one) + "\n")
    return found


def _cases(
    model: Any,
    placed: Sequence[PlacedBatch],
    places: Sequence[Place],
    oracle: "_Oracle",
    dtype: str,
    known: set[tuple[str, int, float]],
) -> Iterator[dict[str, Any]]:
    num_tokens = sum(one.batch.ids_BT.numel() for one in placed)
    policy = Policy(model, Meter(num_tokens), autocast_dtype=DTYPES[dtype])
    coefficients = coefficients_of(placed)
    healthy = replay(policy, placed, coefficients)
    for number, where in enumerate(places):
        if all((dtype, number, times) in known for times in TIMES):
            continue
        alone = [torch.zeros_like(coefficient) for coefficient in coefficients]
        alone[where.batch][where.row, where.column] = 1.0
        unit = replay(policy, placed, alone).gradient
        for times in TIMES:
            if (dtype, number, times) in known:
                continue
            value, share = oracle.planted(number, times)
            changed = [coefficient.clone() for coefficient in coefficients]
            more = value - float(changed[where.batch][where.row, where.column])
            changed[where.batch][where.row, where.column] = value
            spike = _sum(healthy.gradient, unit, more)
            policy.meter.stages.clear()
            scene = Scene(policy, placed, changed, spike, healthy.logp)
            attribution = scene.attributed()
            exact = verified_top(scene, attribution)
            top = max(exact, key=lambda place: exact[place].share)
            yield {
                "dtype": dtype,
                "place": number,
                "times": times,
                "first": top == where,
                "share_oracle": share,
                "share_reported": exact[top].share,
                "share_located": float(attribution.shares[top.batch][top.row, top.column]),
                "checksum": attribution.checksum,
                "norm_error": spike.norm / (times * oracle.norm) - 1.0,
                "cost_steps": sum(policy.meter.stages.values()),
            }


def _sum(one: Gradient, other: Gradient, times: float) -> Gradient:
    return gradient_of({name: tensor + times * other.tensors[name] for name, tensor in one.tensors.items()})


class _Oracle:
    """The healthy gradient and each place's own, in float64 by autograd; nothing but their inner products is kept."""

    def __init__(self, model: Any, placed: Sequence[PlacedBatch], places: Sequence[Place]) -> None:
        exact = copy.deepcopy(model).double()
        parameters = [parameter for parameter in exact.parameters() if parameter.requires_grad]
        for one in placed:
            (_logp(exact, one.batch) * one.coefficient_BR()).sum().backward()
        whole = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        self.norm = math.sqrt(sum(float(g.square().sum()) for g in whole if g is not None))
        self._start, self._cross, self._own = [], [], []
        for where in places:
            batch = placed[where.batch].batch
            logp_BR = _logp(exact, batch, row=where.row)
            mine = torch.autograd.grad(logp_BR[0, where.column], parameters, allow_unused=True)
            pairs = [(g, u) for g, u in zip(whole, mine, strict=True) if g is not None and u is not None]
            self._start.append(float(placed[where.batch].coefficient_BR()[where.row, where.column]))
            self._cross.append(sum(float((g * u).sum()) for g, u in pairs))
            self._own.append(sum(float(u.square().sum()) for u in mine if u is not None))
        self.unit_norms = [math.sqrt(own) for own in self._own]

    def planted(self, number: int, times: float) -> tuple[float, float]:
        """The coefficient, of its old sign, that makes the norm `times` the healthy one; and the token's share then."""
        start, cross, own = self._start[number], self._cross[number], self._own[number]
        goal = (times * self.norm) ** 2
        root = math.sqrt(cross**2 - own * (self.norm**2 - goal))
        more = (-cross + math.copysign(root, start)) / own
        value = start + more
        return value, value * (cross + more * own) / goal


def _logp(model: Any, batch: MicroBatch, row: int | None = None) -> Tensor:
    """Logp of each response token [B, R], as any trainer computes it."""
    rows = slice(None) if row is None else slice(row, row + 1)
    assert batch.attention_mask_BT is not None and batch.position_ids_BT is not None
    num = batch.logp_BR.shape[1]
    logits = model(
        input_ids=batch.ids_BT[rows],
        attention_mask=batch.attention_mask_BT[rows].long(),
        position_ids=batch.position_ids_BT[rows],
        use_cache=False,
        logits_to_keep=num + 1,
    ).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp_BR: Tensor = torch.log_softmax(logits, dim=-1).gather(-1, batch.ids_BT[rows, -num:, None])[..., 0]
    return logp_BR


def _batches(model: Any, tokenizer: Any) -> tuple[PlacedBatch, ...]:
    """Sampled answers with coefficients -advantage * ratio / N, four rows a micro-batch."""
    texts = [f"Question: {a} + {b} = ?\nAnswer:" for a, b in SUMS for _ in range(NUM_ANSWERS)]
    fed = tokenizer(texts, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        ids_BT = model.generate(
            **fed, do_sample=True, max_new_tokens=NUM_NEW_TOKENS, min_new_tokens=NUM_NEW_TOKENS, top_k=0, top_p=1.0,
            temperature=1.0, repetition_penalty=1.0, pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
    attention_BT = torch.cat([fed["attention_mask"].bool(), torch.ones(len(texts), NUM_NEW_TOKENS).bool()], dim=1)
    position_BT = (attention_BT.long().cumsum(dim=1) - 1).clamp(min=0)
    answers = [tokenizer.decode(row) for row in ids_BT[:, -NUM_NEW_TOKENS:]]
    wanted = [str(a + b) for a, b in SUMS for _ in range(NUM_ANSWERS)]
    reward_NG = torch.tensor(
        [float(want in said) - 0.01 * len(said) for want, said in zip(wanted, answers, strict=True)]
    ).view(-1, NUM_ANSWERS)
    centred_NG = reward_NG - reward_NG.mean(dim=1, keepdim=True)
    advantage_B = (centred_NG / (reward_NG.std(dim=1, keepdim=True) + 1e-4)).flatten()
    blank_BR = torch.zeros(len(texts), NUM_NEW_TOKENS)
    whole = MicroBatch(
        ids_BT=ids_BT, mask_BR=blank_BR.bool(), logp_BR=blank_BR, coefficient_BR=blank_BR,
        attention_mask_BT=attention_BT, position_ids_BT=position_BT,
    )  # fmt: skip
    batches = []
    for rows in torch.arange(len(texts)).split(NUM_ROWS):
        batch = MicroBatch(
            **{
                name: value[rows] if isinstance(value, Tensor) else value
                for name, value in vars(whole).items()
                if value is not None
            }
        )
        with torch.no_grad():
            logp_BR = _logp(model, batch)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                rollout_BR = _logp(model, batch)
        advantage_BR = advantage_B[rows, None].expand_as(logp_BR)
        coefficient_BR = -advantage_BR * torch.exp(logp_BR - rollout_BR) / blank_BR.numel()
        batches.append(
            replace(
                batch,
                mask_BR=torch.ones_like(logp_BR).bool(),
                logp_BR=logp_BR,
                coefficient_BR=coefficient_BR,
                rollout_logp_BR=rollout_BR,
                advantage_BR=advantage_BR,
            )
        )
    return place([(batches, 1.0)])


def _places(placed: Sequence[PlacedBatch], seed: int) -> list[Place]:
    """Tokens that the model was not sure of, in different micro-batches; a stale logp makes a ratio, never turns it."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(NUM_PLACES):
        batch = placed[index % len(placed)].batch
        fit = ((batch.coefficient_BR != 0) & (batch.logp_BR < math.log(0.7))).nonzero()
        row, column = fit[int(torch.randint(len(fit), (1,), generator=generator))].tolist()
        found.append(Place(index % len(placed), row, column))
    return found
