"""Remedies: bounds on tokens, answers, layers and rewards, off unless switched on.

The functions are pure and usable alone; the objects are what `gradloc.watch(remedies=[...])` takes.
When to use which and what each costs: docs/remedies.md.
"""

from gradloc.clipping.applied import Remedy
from gradloc.clipping.layer import layer_clip
from gradloc.clipping.reward import group_advantages, guard_rewards
from gradloc.clipping.sequence import seq_clip, sequence_log_ratio
from gradloc.clipping.switches import LayerAction, LayerClip, RewardGuard, SeqClip, TokenClip
from gradloc.clipping.token import token_clip

__all__ = [
    "LayerAction",
    "LayerClip",
    "Remedy",
    "RewardGuard",
    "SeqClip",
    "TokenClip",
    "group_advantages",
    "guard_rewards",
    "layer_clip",
    "seq_clip",
    "sequence_log_ratio",
    "token_clip",
]
