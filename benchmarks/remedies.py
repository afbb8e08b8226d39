"""The staircase of stability: how long GRPO runs last under each remedy, with and without planted faults.

    python benchmarks/remedies.py --json            5 seeds, every remedy, both settings; an hour or two on 2 cores
    python benchmarks/remedies.py --json --quick    one seed, a few steps: shows that it runs

Written down before the first run of seeds 301 to 305, which are the ones reported. Seen before, so not
reported: 1 to 5 (LayerClip's first limits), 100 to 120 (learning rates, fault rates, lengths), 201 to 206
(LayerClip's present limits).

Collapse. The first step whose trailing mean reward over 10 steps is below half of the mean reward of the
run's first 20 steps, or after which a weight is not finite. A run stops there. One that never collapses
counts as lasting all its steps, in the median too (censored; `survival` says how many did).

Spike. A step whose gradient norm, after TokenClip and SeqClip but before LayerClip and any clipper, is not
finite or above 4 times the median of the last 32 norms that were no spikes.

Expected order, planted: none < TokenClip < + SeqClip < + LayerClip in steps until collapse, for the faults
set in one after another as in GradLoc's article: token mismatches first, wrong temperature on some replicas
next, layer explosions last. Natural: the same order or a tie where nothing collapses; spikes with TokenClip
at most 10 % of those without; LayerClip makes no difference to loss-side spikes; some final reward is lost
to clipping. The trainer's own clipping to norm 1 stays on in all four; the published clippers take its place.

The policy is a four-layer Qwen3-shaped transformer that sorts seven digits (verifiable reward), pretrained
on noisy demonstrations; 8 prompts of 8 answers a step, AdamW (.9, .95). The natural setting's inference copy
has 3-bit weights, is up to 8 steps stale and samples with top-p; its logp are truthful. The planted setting's
copy is exact.

Last line with --json: {"remedies": [{name, natural, seeds, steps_to_collapse_median, survival,
reward_final_median, spikes}], "layerclip_cosine", "global_clip_cosine", ...}.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from staircase import single
from staircase.picture import survival_svg
from staircase.policy import pretrained
from staircase.run import NATURAL, OTHERS, PLANTED, STAIRCASE, Setting, Variant, spikes, train

FINAL_STEPS = 20


def runs(
    settings: Sequence[Setting], variants: Sequence[Variant], seeds: Sequence[int], kept: Path | None
) -> list[dict[str, Any]]:
    """Outcomes as dictionaries; those in `kept` are not run again, new ones are added to it."""
    known = {}
    if kept is not None and kept.exists():
        for line in kept.read_text().splitlines():
            outcome = json.loads(line)
            known[outcome["setting"], outcome["variant"], outcome["seed"]] = outcome
    found = []
    for seed in seeds:
        for setting in settings:
            weights = None
            for variant in variants:
                key = (setting.name, variant.name, seed)
                if key not in known:
                    if weights is None:
                        weights = pretrained(seed, setting.pretraining_steps, setting.swap).state_dict()
                    known[key] = train(setting, variant, seed, weights).as_dict()
                    if kept is not None:
                        with kept.open("a") as lines:
                            lines.write(json.dumps(known[key]) + "\n")
                    sys.stderr.write(f"{key}: {described(known[key])}\n")
                found.append(known[key])
    return found


def described(outcome: dict[str, Any]) -> str:
    return f"collapse {outcome['collapsed_at']}, final reward {statistics.fmean(outcome['rewards'][-FINAL_STEPS:]):.2f}"


def row(setting: Setting, variant: Variant, outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table. Spikes are counted up to collapse and given per 100 steps as well, for runs end early."""
    mine = [one for one in outcomes if (one["setting"], one["variant"]) == (setting.name, variant.name)]
    lasted = [setting.num_steps if one["collapsed_at"] is None else one["collapsed_at"] for one in mine]
    num_spikes = [len(spikes(one["norms"])) for one in mine]
    curve = [[at, sum(last >= at for last in lasted) / len(lasted)] for at in range(0, setting.num_steps + 1, 10)]
    return {
        "name": variant.name,
        "natural": setting.name == NATURAL.name,
        "seeds": [one["seed"] for one in mine],
        "steps_to_collapse": lasted,
        "steps_to_collapse_median": statistics.median(lasted),
        "num_steps": setting.num_steps,
        "survival": sum(one["collapsed_at"] is None for one in mine) / len(mine),
        "survival_curve": curve,
        "reward_first_median": statistics.median(statistics.fmean(one["rewards"][:FINAL_STEPS]) for one in mine),
        "reward_final_median": statistics.median(statistics.fmean(one["rewards"][-FINAL_STEPS:]) for one in mine),
        "reward_mean_median": statistics.median(
            sum(one["rewards"]) / setting.num_steps for one in mine
        ),  # of all planned steps, those after collapse counting 0
        "spikes": sum(num_spikes),
        "spikes_per_100_steps": 100 * sum(num_spikes) / sum(len(one["norms"]) for one in mine),
        "norm_max": max(max(one["norms"]) for one in mine),
        "acted": {
            name: statistics.fmean(one["remedied"].get(name, 0.0) for one in mine) for name in mine[0]["remedied"]
        },
    }


def single_steps(seeds: Sequence[int], quick: bool) -> dict[str, Any]:
    pretraining_steps = 60 if quick else PLANTED.pretraining_steps  # of the healthy runs; events are the demo's
    found = [event for seed in seeds for event in single.events(seed, 1 if quick else 3)]
    layer = [event for event in found if event.fault == "layer" and event.layers]
    token = [event for event in found if event.fault == "token" and event.layers]
    healthy = [single.healthy(seed, 25 if quick else 300, pretraining_steps) for seed in seeds]
    num_steps, touched, acted, num_spikes = (sum(column) for column in zip(*healthy, strict=True))
    return {
        "layerclip_cosine": _median(event.cosine_layer_clip for event in layer),
        "global_clip_cosine": _median(event.cosine_global_clip for event in layer),
        "layerclip_cosine_minus_bound_min": min((e.cosine_layer_clip - e.bound for e in layer), default=None),
        "layer_events": len(layer),
        "layer_events_without_action": sum(event.fault == "layer" and not event.layers for event in found),
        "layerclip_cosine_loss_side": _median(event.cosine_layer_clip for event in token),
        "global_clip_cosine_loss_side": _median(event.cosine_global_clip for event in token),
        "healthy_steps": num_steps,
        "healthy_steps_touched_by_layerclip": touched,
        "healthy_steps_untouched": 1 - touched / num_steps,
        "healthy_tokens_or_sequences_acted_on": acted - touched,
        "healthy_spikes": num_spikes,
        "overhead": single.overhead(5 if quick else 40),
        "events": [asdict(event) for event in found],
    }


def _median(values: Any) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[301, 302, 303, 304, 305])
    parser.add_argument("--only", choices=["planted", "natural", "single"], help="this part alone")
    parser.add_argument("--staircase", action="store_true", help="without the published clippers")
    parser.add_argument("--runs", type=Path, help="JSON lines of finished runs: read, and added to")
    parser.add_argument("--picture", type=Path, help="write the survival curves there, as SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = [one for one in (PLANTED, NATURAL) if arguments.only in (None, one.name)]
    seeds, variants = arguments.seeds, STAIRCASE if arguments.staircase else (*STAIRCASE, *OTHERS)
    if arguments.quick:
        settings = [replace(one, num_steps=26, num_groups=2, pretraining_steps=60) for one in settings]
        seeds, variants = seeds[:1], STAIRCASE
    outcomes = runs(settings, variants, seeds, arguments.runs)
    result: dict[str, Any] = {
        "remedies": [row(setting, variant, outcomes) for setting in settings for variant in variants],
        "torch": torch.__version__,
    }
    if arguments.only in (None, "single"):
        result |= single_steps(seeds, arguments.quick)
    if arguments.picture is not None:
        arguments.picture.write_text(survival_svg(result["remedies"]))
    sys.stdout.write(json.dumps(result) + "\n" if arguments.json else table(result))


def table(result: dict[str, Any]) -> str:
    lines = ["setting  remedy        steps  survived  final reward  spikes"]
    for one in result["remedies"]:
        setting = "natural" if one["natural"] else "planted"
        lines.append(
            f"{setting}  {one['name']:12}  {one['steps_to_collapse_median']:5.0f}  {one['survival']:8.1f}  "
            f"{one['reward_final_median']:12.2f}  {one['spikes']:6d}"
        )
    lines += [f"{name}: {value}" for name, value in result.items() if name not in ("remedies", "events")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
