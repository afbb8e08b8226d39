"""What came of a performance, beside the truth: the demo's JSON and its exit code. Pure."""

from typing import Any

from gradloc.demo.envelope import ANSWERS
from gradloc.demo.performance import Played, Script

_TOKEN = ("rank", "micro_batch", "sequence", "token")
_PLACE = ("step", *_TOKEN)
_WITHOUT_PLACE = ("batch-wide", "accounting", "norm-overflow", "not-reproduced", "inconclusive")


def review(script: Script, played: Played) -> dict[str, Any]:
    """The demo's JSON object; `right` says whether it ended as it should."""
    truth = played.truth
    finding = played.finding or {}
    certificate = finding.get("certificate") or {}
    fidelity = finding.get("fidelity") or {}
    culprits = finding.get("culprits") or []
    texts = played.slack_texts
    struck_at = None if truth is None else truth["step"]
    num_steps = played.outcomes[0]["steps"] if played.outcomes else None
    finished = num_steps is not None and len(played.step_times) == num_steps
    result = {
        "fault": script.fault,
        "seed": script.seed,
        "strategy": script.strategy,
        "truth": None if truth is None else truth if len(truth) > 1 else {**truth, "place": "no token"},
        "found": _found(finding),
        "verdict": finding.get("verdict"),
        "cause": (finding.get("causes") or [{}])[0].get("name"),
        "cause_text": (finding.get("causes") or [{}])[0].get("summary"),
        "confidence": (finding.get("causes") or [{}])[0].get("confidence"),
        "share": culprits[0]["share"] if culprits else None,
        "checksum": finding.get("checksum"),
        "grad_norm": certificate.get("grad_norm", fidelity.get("reported_norm")),
        "healthy_norm": finding.get("healthy_norm"),
        "norm_without": certificate.get("norm_without"),
        "limit": certificate.get("limit"),
        "fix": finding.get("fix"),
        "replay_rel_error": fidelity.get("rel_error"),
        "trainer_stall_s": max((float(outcome["stall_s"]) for outcome in played.outcomes), default=None),
        "steps_during_localization": _steps_between(played.step_times, played.alert_at, played.culprit_at),
        "layers_exploding": [
            int(name.removeprefix("layers."))
            for name in finding.get("layers_exploding") or ()
            if name.startswith("layers.")
        ],
        "module_kinds_exploding": finding.get("module_kinds_exploding") or [],
        "profile_peak": _profile_peak(finding.get("profile")),
        "seconds_to_alert": _seconds(played, struck_at, played.alert_at),
        "seconds_to_culprit": _seconds(played, struck_at, played.culprit_at),
        "slack": texts[0] if texts else None,
        "incidents": len(played.incidents),
        "events_dropped": sum(int(outcome["num_events_dropped"]) for outcome in played.outcomes),
        "training_steps": len(played.step_times),
        "training_finished": finished,
        "redis_killed": played.redis_killed,
    }
    return {**result, "right": _is_right(script, result)}


def in_short(result: dict[str, Any]) -> dict[str, Any]:
    """One row of the table of all faults."""
    return {key: result.get(key) for key in ("fault", "right", "verdict", "cause", "truth", "found")}


def _is_right(script: Script, result: dict[str, Any]) -> bool:
    answer = ANSWERS[script.fault]
    if not result["training_finished"]:
        return False
    if script.kill_redis_at_step is not None:
        # Nothing can be found without Redis; what counts is that training went on and the loss is told.
        return bool(result["redis_killed"] and result["events_dropped"] > 0)
    truth, found = result["truth"], result["found"]
    if answer.verdict is None:
        return truth is None and result["incidents"] == 0 and found is None
    if truth is None or found is None or (result["verdict"], result["cause"]) != (answer.verdict, answer.cause):
        return False
    match answer.place:
        case "no token":
            # Its spike may come some steps after the fault began.
            return "place" in found and found["step"] >= truth["step"]
        case "rank":
            keys: tuple[str, ...] = ("step", "rank")
        case "sequence":
            keys = ("step", *_TOKEN[:3])
        case "tokens":
            return found["step"] == truth["step"] and _places(found["tokens"]) == _places(truth["tokens"])
        case "token":
            keys = _PLACE
    places = [truth, *({**truth, **other} for other in truth.get("tied", ()))]
    if not any(all(found.get(key) == place[key] for key in keys) for place in places):
        return False
    # Where layers explode, the culprit is the token after the planted position; the profile must show that one.
    peak = result["profile_peak"]
    return "position" not in truth or (peak is not None and peak["position"] == truth["position"])


def _places(tokens: list[dict[str, Any]]) -> set[tuple[int, ...]]:
    return {tuple(token[key] for key in _TOKEN) for token in tokens}


def _found(finding: dict[str, Any]) -> dict[str, Any] | None:
    """Where the finding says it was; `place` where it says that no token is to blame."""
    if not finding:
        return None
    culprits = finding.get("culprits") or []
    if finding["verdict"] in _WITHOUT_PLACE or not culprits:
        rank = (finding.get("causes") or [{}])[0].get("evidence", {}).get("rank")
        found: dict[str, Any] = {"step": finding["step"], "place": f"no token: {finding['verdict']}"}
        return found if rank is None else {**found, "rank": int(rank)}
    first = culprits[0]
    return {
        "step": finding["step"],
        **{key: first.get(key) for key in _TOKEN},
        "token_id": first.get("token_id"),
        "token_text": first.get("token_text"),
        "layer": first.get("layer"),
        "tokens": [{key: one.get(key) for key in _TOKEN} for one in culprits],
    }


def _profile_peak(profile: dict[str, Any] | None) -> dict[str, Any] | None:
    """Layer and position that hold most of the culprit sequence's squared gradient."""
    if not profile or not profile["values"]:
        return None
    value, layer, column = max(
        (float(value), layer, column)
        for layer, row in zip(profile["layers"], profile["values"], strict=True)
        for column, value in enumerate(row)
    )
    return {"layer": layer, "position": profile["first_position"] + column, "share": value}


def _steps_between(times: list[float], begin: float | None, end: float | None) -> int:
    if begin is None or end is None:
        return 0
    return sum(begin <= at <= end for at in times)


def _seconds(played: Played, step: int | None, at: float | None) -> float | None:
    if step is None or at is None or step >= len(played.step_times):
        return None
    return round(at - played.step_times[step], 3)
