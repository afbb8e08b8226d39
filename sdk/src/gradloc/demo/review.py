"""What came of a performance, beside the truth: the demo's JSON and its exit code. Pure."""

from typing import Any

from gradloc.demo.performance import Played, Script

_PLACE = ("step", "rank", "micro_batch", "sequence", "token")


def review(script: Script, played: Played) -> dict[str, Any]:
    """The demo's JSON object; `right` says whether it ended as it should."""
    truth = played.truth
    finding = played.finding or {}
    found = _found(finding)
    certificate = finding.get("certificate") or {}
    fidelity = finding.get("fidelity") or {}
    first = played.outcomes[0] if played.outcomes else {}
    texts = played.slack.texts()
    struck_at = None if truth is None else truth["step"]
    finished = bool(first) and len(played.step_times) == script.num_steps
    result = {
        "fault": script.fault,
        "seed": script.seed,
        "strategy": script.strategy,
        "truth": truth,
        "found": found,
        "verdict": finding.get("verdict"),
        "cause": (finding.get("causes") or [{}])[0].get("name"),
        "share": None if found is None else finding["culprits"][0]["share"],
        "checksum": finding.get("checksum"),
        "grad_norm": certificate.get("grad_norm"),
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


def _is_right(script: Script, result: dict[str, Any]) -> bool:
    if not result["training_finished"]:
        return False
    if script.kill_redis_at_step is not None:
        # Nothing can be found without Redis; what counts is that training went on and the loss is told.
        return bool(result["redis_killed"] and result["events_dropped"] > 0)
    if result["truth"] is None:
        return script.fault == "none" and result["incidents"] == 0 and result["found"] is None
    truth, found, peak = result["truth"], result["found"], result["profile_peak"]
    if found is None or any(found[key] != truth[key] for key in _PLACE):
        return False
    # Where layers explode, the culprit is the token after the planted position; the profile must show that one.
    return "position" not in truth or (peak is not None and peak["position"] == truth["position"])


def _found(finding: dict[str, Any]) -> dict[str, Any] | None:
    culprits = finding.get("culprits") or []
    if not culprits:
        return None
    first = culprits[0]
    place = {key: first.get(key) for key in _PLACE[1:]}
    return {
        "step": finding["step"],
        **place,
        "token_id": first.get("token_id"),
        "token_text": first.get("token_text"),
        "layer": first.get("layer"),
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
