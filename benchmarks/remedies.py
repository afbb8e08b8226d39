"""The staircase of stability: how long GRPO runs last under each remedy, with and without planted faults.

    python benchmarks/remedies.py --json            5 seeds, every remedy, both settings; an hour or two on 2 cores
    python benchmarks/remedies.py --json --quick    one seed, a few steps: shows that it runs

Written down before the first run of seeds 1 to 5 (learning rate, fault rates and lengths were set on seeds
from 100 on, which are not reported):

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
has int4 weights, is up to 8 steps stale and samples with top-p; its logp are truthful. The planted setting's
copy is exact.

Last line with --json: {"remedies": [{name, natural, seeds, steps_to_collapse_median, survival,
reward_final_median, spikes}], "layerclip_cosine", "global_clip_cosine", ...}.
"""
