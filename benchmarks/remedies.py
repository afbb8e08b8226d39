"""The staircase of stability: how long GRPO runs last under each remedy, with and without planted faults.

    python benchmarks/remedies.py --json            5 seeds, every remedy, all settings; an hour or two on 2 cores
    python benchmarks/remedies.py --json --quick    one seed, a few steps: shows that it runs

Written down before the first run of the seeds that are reported: 401 to 405 natural, 601 to 605 planted, 811 to 820
single steps. Seen before, so not reported: 1 to 5 (LayerClip's first limits), 100 to 120 (learning rates, fault
rates, lengths, the schedule of the layer fault, the natural copy, the size of the batch), 201 to 206 (LayerClip's
limits, what keeps its cosine under the bound; positions held back). Single steps of 401 to 405 and 501 to 505 were
reported of the LayerClip that scaled layers alone, and seen again when it learned to hold positions back, as was what
it made of 601 to 605. 701 to 710 and 801 to 805 were run with the first rules about
positions and count as seen: with a limit from the largest position of each step, and one for the embedding too, 30 of
30 were within .05 of the bound but 455 of 6,000 healthy steps touched (positions of padding are the largest of what
enters the embedding); with a position's limit as it is now but cancelled ones not held back from every block, 14 of 15
were. Reported of planted settings before this
one: 301 to 305 (a layer fault in one step of three, which no run collapsed of), 401 and 402 (8 prompts a step, of
which six replicas' answers are left out: too few to learn from, with or without LayerClip), 501 to 505 (layer faults
from step 90, when TokenClip's runs had not yet died of the wrong temperature: TokenClip 153, + SeqClip 153, +
LayerClip 218).

Collapse. The first step whose trailing mean reward over 10 steps is below half of the mean reward of the
run's first 20 steps, or after which a weight is not finite. A run stops there. One that never collapses
counts as lasting all its steps, in the median too (censored; `survival` says how many did).

Spike. A step whose gradient norm, after TokenClip, SeqClip and the positions that LayerClip held back, but before
layers are scaled and before any clipper, is not finite or above 4 times the median of the last 32 norms that were no
spikes.

Expected order, planted: none < TokenClip < + SeqClip < + LayerClip in steps until collapse, for the faults set in one
after another as in GradLoc's article: token mismatches first, wrong temperature on most replicas next, layer
explosions last, each when the remedy before it has had its day. Seen on seeds 112 and 113: TokenClip 134, 136, +
SeqClip 157, 176, + LayerClip not within 300 on either, with final rewards of .59 and .56, where scaling layers alone
left .43: a run whose layers are scaled loses what all other tokens sent into them, one whose struck positions are held
back does not. So + LayerClip is expected to outlast the others on each seed (a tie only at 300).

Expected, natural: no collapse; with TokenClip a tenth of the spikes or less. On seeds 102 and 103 8 and 5 spikes
without a remedy, ratios 8 to 119, none and none with TokenClip; on 101 one. The batch decides which spikes there are:
a token's part of the norm is its ratio times its grad logp over the number of tokens. Of 96 answers a grad logp of
ten times the usual is enough for a spike at a ratio that TokenClip lets pass, 2.6 to 5, in the embedding and the
lower layers: type B (seed 101: 6 of 14 spikes left in fp8, 2 of 7 in 4 bits). Of 256 it is not, and what spikes are
the ratios of 8 and more that an inference copy's rare tokens have (0 of 27 left).

Single steps. The bound, sqrt(1 - the healthy share of the squared norm of the layers that explode), is what is left
where nothing is kept of those and the struck answer leaves nothing in the others. The latter is not so: scaling whole
layers, even by who knows the healthy gradient (`best`), stayed more than .05 under the bound in 9 of 47 steps of seeds
201 to 206, 401 to 405 and 501 to 505. With positions held back, 21 steps of 201, 206, 501, 502, 701, 801 and 804 are
.98 in the median and at least .77, under the bound in one, by .007. Expected of the reported seeds: each step within
.05 of the bound, three of four more than .1 above it. Loss-side faults were expected not to be helped, and were not by
scaling (.11). What one token sends into the blocks is held back whatever made it large: .85 to .99 on the same seeds;
the head is scaled. That is expected to stay so for a fault of one token. Healthy steps: untouched in 99.9 % (of 1,800
of seeds 201 to 203 no position is over its limit; the least stream of a position is .30 of the median's).

The policy is a four-layer Qwen3-shaped transformer that sorts seven digits (verifiable reward), pretrained on noisy
demonstrations; AdamW (.9, .95). The trainer's own clipping to norm 1 stays on in all four; the published clippers
take its place. Planted: 16 prompts of 8 answers a step, an exact copy.
Natural: 32 prompts of 8, the copy of 4-bit weights and up to 8 steps stale; it reports the logp that it samples with.
The harsh setting, reported until seed 305: a copy of 3-bit weights, up to 8 steps stale, top-p .999.

Last line with --json: {"remedies": [{name, natural, seeds, steps_to_collapse_median, survival,
reward_final_median, spikes}], "layerclip_cosine", "global_clip_cosine", ...}.
"""

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from staircase import single
from staircase.picture import survival_svg
from staircase.policy import pretrained
from staircase.run import HARSH, NATURAL, OTHERS, PLANTED, STAIRCASE, Setting, Variant, spikes, train

FINAL_STEPS = 20
SEEDS = {PLANTED.name: (601, 602, 603, 604, 605), "single": tuple(range(811, 821))}
OTHER_SEEDS = (401, 402, 403, 404, 405)
HEALTHY_STEPS = 600
VARIANTS = (*STAIRCASE, *OTHERS)


class Kept:
    """Finished parts, by setting, variant and seed, as lines of a file where one is given; none is run twice."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, int], dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                part = json.loads(line)
                self._known[part["setting"], part["variant"], part["seed"]] = part

    def part(self, setting: str, variant: str, seed: int, made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        key = (setting, variant, seed)
        if key not in self._known:
            self._known[key] = {"setting": setting, "variant": variant, "seed": seed} | made()
            sys.stderr.write(f"{key}: {described(self._known[key])}\n")
            if self._path is not None:
                with self._path.open("a") as lines:
                    lines.write(json.dumps(self._known[key]) + "\n")
        return self._known[key]


def runs(
    settings: Sequence[Setting], variants: Sequence[Variant], seeds: Sequence[int] | None, kept: Kept, quick: bool
) -> list[dict[str, Any]]:
    @functools.cache
    def weights(setting: Setting, seed: int) -> dict[str, torch.Tensor]:
        return pretrained(seed, setting.pretraining_steps, setting.swap).state_dict()

    def made(setting: Setting, variant: Variant, seed: int) -> dict[str, Any]:
        return train(setting, variant, seed, weights(setting, seed)).as_dict()

    return [
        kept.part(setting.name, variant.name, seed, functools.partial(made, setting, variant, seed))
        for setting in settings
        for seed in _seeds(setting.name, seeds, quick)
        for variant in variants
    ]


def _seeds(part: str, wanted: Sequence[int] | None, quick: bool) -> Sequence[int]:
    seeds = wanted or SEEDS.get(part, OTHER_SEEDS)
    return seeds[:1] if quick else seeds


def described(outcome: dict[str, Any]) -> str:
    if "rewards" not in outcome:
        return "done"
    return f"collapse {outcome['collapsed_at']}, final reward {statistics.fmean(outcome['rewards'][-FINAL_STEPS:]):.2f}"


def row(setting: Setting, variant: Variant, outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line of the table. Spikes are counted up to collapse and given per 100 steps as well, for runs end early."""
    mine = [one for one in outcomes if (one["setting"], one["variant"]) == (setting.name, variant.name)]
    mine.sort(key=lambda one: one["seed"])
    lasted = [setting.num_steps if one["collapsed_at"] is None else one["collapsed_at"] for one in mine]
    num_spikes = [len(spikes(one["norms"])) for one in mine]
    curve = [[at, sum(last >= at for last in lasted) / len(lasted)] for at in range(0, setting.num_steps + 1, 10)]
    return {
        "name": variant.name,
        "setting": setting.name,
        "natural": setting.name != PLANTED.name,
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


def single_steps(seeds: Sequence[int], quick: bool, kept: Kept) -> dict[str, Any]:
    def events(seed: int) -> dict[str, Any]:
        return {"events": [asdict(event) for event in single.events(seed, 1 if quick else 3)]}

    def healthy(seed: int) -> dict[str, Any]:
        return asdict(single.healthy(seed, 25 if quick else HEALTHY_STEPS, 60 if quick else PLANTED.pretraining_steps))

    struck = [kept.part("events", "LayerClip", seed, functools.partial(events, seed)) for seed in seeds]
    calm = [kept.part("healthy", "+ LayerClip", seed, functools.partial(healthy, seed)) for seed in seeds]
    found = [single.Event(**event) for part in struck for event in part["events"]]
    layer = [event for event in found if event.fault == "layer" and event.layers]
    token = [event for event in found if event.fault == "token" and event.layers]
    num_steps, touched = (sum(part[name] for part in calm) for name in ("num_steps", "num_touched"))
    below = [event.cosine_layer_clip - event.bound for event in layer]
    return {
        "layerclip_cosine": _median(event.cosine_layer_clip for event in layer),
        "layers_only_cosine": _median(event.cosine_layers_only for event in layer),
        "global_clip_cosine": _median(event.cosine_global_clip for event in layer),
        "layerclip_cosine_minus_bound_min": min(below, default=None),
        "layerclip_cosine_minus_bound_median": _median(below),
        "layer_events_within_05_of_bound": sum(one >= -0.05 for one in below),
        "layerclip_cosine_minus_best_min": min((e.cosine_layer_clip - e.best for e in layer), default=None),
        "layer_events_whose_best_is_within_05_of_bound": sum(e.best - e.bound >= -0.05 for e in layer),
        "layer_events": len(layer),
        "layer_events_without_action": sum(event.fault == "layer" and not event.layers for event in found),
        "layerclip_cosine_loss_side": _median(event.cosine_layer_clip for event in token),
        "layers_only_cosine_loss_side": _median(event.cosine_layers_only for event in token),
        "global_clip_cosine_loss_side": _median(event.cosine_global_clip for event in token),
        "healthy_steps": num_steps,
        "healthy_steps_touched_by_layerclip": touched,
        "healthy_steps_untouched": 1 - touched / num_steps,
        "healthy_tokens_or_sequences_acted_on": sum(part["num_others"] for part in calm),
        "healthy_spikes": sum(part["num_spikes"] for part in calm),
        "overhead": single.overhead(5 if quick else 40),
        "event_seeds": list(seeds),
        "events": [asdict(event) for event in found],
    }


def _median(values: Any) -> float | None:
    known = list(values)
    return statistics.median(known) if known else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one seed, a few steps")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those that are reported, see above")
    parser.add_argument("--only", choices=["planted", "natural", "harsh", "single"], help="this part alone")
    parser.add_argument("--remedies", nargs="+", choices=[one.name for one in VARIANTS], help="these alone")
    parser.add_argument("--runs", type=Path, help="JSON lines of finished runs: read, and added to")
    parser.add_argument("--picture", type=Path, help="write the survival curves there, as SVG")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = [one for one in (PLANTED, NATURAL, HARSH) if arguments.only in (None, one.name)]
    variants = VARIANTS
    if arguments.remedies is not None:
        variants = tuple(one for one in VARIANTS if one.name in arguments.remedies)
    if arguments.quick:
        settings = [replace(one, num_steps=26, num_groups=2, pretraining_steps=60) for one in settings]
        variants = STAIRCASE
    kept = Kept(arguments.runs)
    outcomes = runs(settings, variants, arguments.seeds, kept, arguments.quick)
    result: dict[str, Any] = {
        "remedies": [row(setting, variant, outcomes) for setting in settings for variant in variants],
        "torch": torch.__version__,
    }
    if arguments.only in (None, "single"):
        result |= single_steps(_seeds("single", arguments.seeds, arguments.quick), arguments.quick, kept)
    if arguments.picture is not None:
        arguments.picture.write_text(survival_svg([one for one in result["remedies"] if one["setting"] != HARSH.name]))
    sys.stdout.write(json.dumps(result) + "\n" if arguments.json else table(result))


def table(result: dict[str, Any]) -> str:
    lines = ["setting  remedy        steps  survived  final reward  spikes"]
    for one in result["remedies"]:
        lines.append(
            f"{one['setting']:7}  {one['name']:12}  {one['steps_to_collapse_median']:5.0f}  {one['survival']:8.1f}  "
            f"{one['reward_final_median']:12.2f}  {one['spikes']:6d}"
        )
    lines += [f"{name}: {value}" for name, value in result.items() if name not in ("remedies", "events")]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
