"""Whether reward model and policy read the same ids alike. Part of the reward layer."""

from gradloc.checks.finding import CheckFinding, finding
from gradloc.checks.vocabulary import Vocabulary


def check_tokenizers(policy: Vocabulary, reward: Vocabulary, *, shares_ids: bool = True) -> tuple[CheckFinding, ...]:
    """Compare two tokenizers. shares_ids: the reward model gets the policy's ids, not text that it encodes itself;
    with text, vocabularies may differ."""
    found: list[CheckFinding] = []
    if shares_ids:
        differing = sorted(
            text
            for text in policy.ids_of.keys() | reward.ids_of.keys()
            if policy.ids_of.get(text) != reward.ids_of.get(text)
        )
        if differing:
            ids = [one for one in (policy.ids_of.get(differing[0]), reward.ids_of.get(differing[0])) if one is not None]
            what = f"{len(differing):,} tokens have other ids ({policy.size:,} and {reward.size:,} tokens)"
            found.append(finding("reward.tokenizer-vocabulary", what, {"first_id": min(ids)}, num=len(differing)))
        for role in sorted(policy.roles.keys() & reward.roles.keys()):
            mine, theirs = policy.role_id(role), reward.role_id(role)
            if mine != theirs:
                what = f"{role} is id {mine} for the policy, {theirs} for the reward model"
                found.append(finding("reward.tokenizer-special", what, {"role": role}))
        if (
            not any(one.code == "reward.tokenizer-special" for one in found)
            and policy.special_ids != reward.special_ids
        ):
            apart = policy.special_ids ^ reward.special_ids
            what = f"{len(apart)} ids are special for one of them only"
            found.append(finding("reward.tokenizer-special", what, {"first_id": min(apart)}, num=len(apart)))
    for side in ("padding_side", "truncation_side"):
        mine_side, their_side = policy.sides.get(side), reward.sides.get(side)
        if mine_side is not None and their_side is not None and mine_side != their_side:
            what = f"policy {mine_side}, reward model {their_side}"
            code = f"reward.tokenizer-{side.replace('_', '-')}"
            found.append(finding(code, what, {"setting": side}))
    return tuple(found)
