"""What people are told: every verdict says something true, readable, and safe to show."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import messages as m
from gradloc_proto.plain_text import visible
from gradloc_reporter.figures import factor, number, percent, token_text
from gradloc_reporter.history import event_text
from gradloc_reporter.rendering import mrkdwn, plain
from gradloc_reporter.slack.blocks import SECTION_MAX, TEXT_MAX, blocks_of, clipped, text_of
from gradloc_reporter.text import Story, culprit_in_short, tell, with_text_hidden


def story(kit: Any, finding: m.Finding | None = None, **values: Any) -> Story:
    told = kit.Told()
    known = {
        "run_id": told.run_id,
        "incident_id": "inc-1",
        "status": "open" if finding is None else "located",
        "spike": told.spike(1204),
        "finding": finding,
        "url": "http://gradloc.example/incidents/inc-1",
    }
    return Story(**(known | values))


def test_the_message_of_the_promise(kit: Any) -> None:
    assert plain(tell(story(kit, kit.a_finding()))).splitlines() == [
        "Spike · run qwen3-4b-grpo · step 1,204 · grad norm 640 (healthy 0.41, 1,560x)",
        'Culprit: rank 3 · micro-batch 0 · sequence 2 · token 358 "<th" (id 13708) · 99.9 % of the norm²',
        "Cause: token-level train/inference mismatch (IS ratio 2.1e5). "
        "Without this token the norm is 0.43 (limit 1.64).",
        "Fix that would have held: TokenClip [0.5, 5] → norm 0.44",
        "Located",
        "http://gradloc.example/incidents/inc-1",
    ]


@pytest.mark.parametrize(
    ("verdict", "values", "expected"),
    [
        ("sequence", {}, "Culprit: rank 3 · micro-batch 0 · sequence 2 · 99.9 % of the norm²"),
        ("layer", {"layers_exploding": ("layers.0",), "module_kinds_exploding": ("mlp",)}, "position: layers.0 (mlp)"),
        ("batch-wide", {"shares_by_sequence": ((0, 0, 0, 0.12),)}, "the largest sequence has 12 %"),
        ("accounting", {"rest_share": 0.83}, "83 % of the norm² belongs to no token"),
        ("mask", {}, "outside the loss mask"),
        ("norm-overflow", {}, "Accumulate it in float64"),
        ("non-finite", {"layers_exploding": ("layers.3.mlp",)}, "first in layers.3.mlp"),
        ("not-reproduced", {}, "The replay gives norm 640"),
        ("inconclusive", {"checksum": 0.41}, "the shares sum to 0.41, not 1"),
        ("batch-wide", {"approximate": True, "step": 1210}, "Approximate: batch of step 1,210, weights of after"),
        ("token", {"approximate": True}, "weights of after its update"),
    ],
)
def test_every_verdict_has_its_words(kit: Any, verdict: str, values: dict[str, object], expected: str) -> None:
    finding = kit.a_finding(verdict=verdict, **values)
    assert expected in plain(tell(story(kit, finding)))
    assert culprit_in_short(finding)


@pytest.mark.parametrize("verdict", m.VERDICTS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 0.0])
def test_no_verdict_stumbles_over_odd_numbers_or_missing_parts(kit: Any, verdict: str, bad: float) -> None:
    odd = kit.a_finding(
        verdict=verdict,
        culprits=(kit.a_culprit(share=bad, ratio=bad),),
        share=bad,
        checksum=bad,
        rest_share=bad,
        certificate=m.Certificate(grad_norm=bad, norm_without=bad, limit=bad, holds=False, num_culprits=1),
        fix=m.Fix(name="LayerClip", norm_after=bad, holds=False),
        shares_by_sequence=((0, 0, 0, bad),),
    )
    bare = m.Finding(verdict=verdict, strategy="bisect", step=1, summary="", fidelity=odd.fidelity, cost=odd.cost)
    for finding in (odd, bare):
        telling = tell(story(kit, finding, spike=kit.Told().spike(1204, bad)))
        assert telling.lines
        assert "nan" not in plain(telling) and "inf " not in plain(telling)
        blocks_of(telling)


def test_without_a_spike_the_finding_still_tells(kit: Any) -> None:
    assert plain(tell(story(kit, kit.a_finding(), spike=None))).startswith("Spike · run qwen3-4b-grpo · step 1,204")


def test_a_certificate_that_does_not_hold_is_not_called_proof(kit: Any) -> None:
    weak = m.Certificate(grad_norm=640, norm_without=12, limit=1.64, holds=False, num_culprits=3)
    text = plain(tell(story(kit, kit.a_finding(certificate=weak))))
    assert "Even without these 3 tokens the norm is 12, over the limit 1.64" in text


def test_an_origin_is_named_and_what_the_norm_is_without_its_ratio(kit: Any) -> None:
    """A sequence's ratio: the culprits carry the gradient, one stale token made it large."""
    proof = m.Certificate(
        grad_norm=640, norm_without=620, limit=1.64, holds=False, num_culprits=9, norm_without_relossed=1.35
    )
    origin = kit.a_culprit(token=12, token_text=" so", token_id=77, ratio=1.6e5)
    finding = kit.a_finding(verdict="sequence", certificate=proof, origins=(origin,))
    text = plain(tell(story(kit, finding)))
    assert 'Origin: rank 3 · micro-batch 0 · sequence 2 · token 12 " so" (id 77) · IS ratio 1.6e5' in text
    assert "Without the gradient of these 9 sequences alone the norm is 620, over the limit 1.64." in text
    assert "Had the origin's ratio left the loss too, it would be 1.35." in text and "not the whole" not in text
    same = proof.model_copy(update={"norm_without": 1.34, "holds": True})
    text = plain(tell(story(kit, kit.a_finding(certificate=same))))
    assert "left the loss" not in text, "two counterfactuals that agree are one"
    odd = proof.model_copy(update={"norm_without_relossed": math.nan})
    assert "it would be NaN" in plain(tell(story(kit, kit.a_finding(certificate=odd))))


def test_several_culprits_are_listed_and_the_rest_counted(kit: Any) -> None:
    culprits = tuple(kit.a_culprit(token=index, share=0.2) for index in range(5))
    lines = plain(tell(story(kit, kit.a_finding(culprits=culprits, share=0.99)))).splitlines()
    assert lines[1] == "Culprits: 5 tokens, together 99 % of the norm²"
    assert lines[2].startswith("1. rank 3")
    assert lines[5] == "and 2 more on the incident's page"


def test_the_status_says_where_it_stands(kit: Any) -> None:
    def status(**values: Any) -> str:
        return tell(story(kit, **values)).status

    assert status() == "Waiting for localization"
    cliff = m.Flag(rule="dead", series="norm", value=0.1, score=9.0)
    assert status(spike=kit.Told().spike(1, flags=(cliff,))) == "Not about one step's gradient: nothing to localize"
    assert status(status="localizing", localizing=True, stage="verify", fraction=0.6) == "Localizing: verify, 60 %"
    assert "no manifest; it will be tried again" in status(status="failed", failure="no manifest.", retryable=True)
    assert status(status="resolved", resolved_step=1260, resolved_reason="calm") == "Resolved at step 1,260: calm"
    assert status(num_spikes=1000).endswith("1,000 spikes so far")


def test_a_layer_spike_whose_norm_is_healthy_names_the_layer(kit: Any) -> None:
    flag = m.Flag(rule="layer", series="layers.3.mlp", value=38, score=380, baseline=0.1, limit=1)
    spike = kit.Told().spike(9, 0.5, flags=(flag,))
    assert "layer layers.3.mlp 38 (healthy 0.1, 380x)" in tell(story(kit, spike=spike)).figures


# --- safety ------------------------------------------------------------------------------------


def test_slack_gets_no_control_characters_from_outside(kit: Any) -> None:
    nasty = "<!channel> & <http://x|y> `code`"
    finding = kit.a_finding(
        culprits=(kit.a_culprit(token_text=nasty),),
        causes=(m.Cause(name="x", confidence="low", summary=nasty),),
        fix=m.Fix(name=nasty, norm_after=1, holds=True),
    )
    text = mrkdwn(tell(story(kit, finding)))
    assert "<!" not in text and "<http" not in text
    assert "&lt;!channel&gt; &amp; " in text
    assert text.count("`") == 2, "the token's own code marks, and no others"


@given(st.text(max_size=200))
def test_a_token_is_one_printable_line_in_quotes(text: str) -> None:
    shown = token_text(text)
    assert shown.startswith('"') and shown.isprintable()


def test_direction_overrides_are_spelled_out() -> None:
    assert visible("a\u202eb\n", 50) == "a\\u202eb\\n"


def test_redaction_leaves_no_text_of_prompts(kit: Any) -> None:
    finding = kit.a_finding(
        culprits=(kit.a_culprit(token_text="SECRET", uid="SECRET"),),
        origins=(kit.a_culprit(token_text="SECRET", uid="SECRET"),),
        causes=(m.Cause(name="mismatch", confidence="high", summary="SECRET", evidence={"t": "SECRET", "n": 2.0}),),
        summary="SECRET",
        sequence_view=m.SequenceView(
            rank=0, micro_batch=0, sequence=0, first_position=0, token_ids=(1,), token_texts=("SECRET",), shares=(1.0,)
        ),
    )
    hidden = with_text_hidden(story(kit, finding))
    assert "SECRET" not in hidden.finding.model_dump_json()
    text = plain(tell(hidden))
    assert "token 358 (id 13708)" in text and "Cause: mismatch." in text


@given(st.text(max_size=512), st.text(max_size=512), st.integers(1, 40))
def test_blocks_keep_slacks_limits_whatever_the_text(kit: Any, text: str, other: str, count: int) -> None:
    culprits = tuple(kit.a_culprit(token_text=text[:500], layer=other[:500]) for _ in range(count))
    cause = m.Cause(name="&" * 512, confidence="low", summary=other)
    finding = kit.a_finding(culprits=culprits, causes=(cause,), fix=m.Fix(name="<" * 512, norm_after=1, holds=True))
    telling = tell(story(kit, finding, status="failed", failure="&" * 512))
    for block in blocks_of(telling):  # slack_sdk checks on the way
        if block["type"] == "section":
            assert len(block["text"]["text"]) <= SECTION_MAX
    assert len(text_of(telling)) <= TEXT_MAX


def test_the_link_is_a_button_and_stands_in_the_text_for_clients_without_blocks(kit: Any) -> None:
    telling = tell(story(kit, kit.a_finding()))
    *_, last = blocks_of(telling)
    (button,) = last["elements"]
    assert (last["type"], button["type"], button["url"]) == ("actions", "button", telling.url)
    assert f"<{telling.url}|Open the incident>" in text_of(telling)
    assert [block["type"] for block in blocks_of(tell(story(kit, url=None)))] == ["section", "context"]


def test_cutting_never_leaves_half_an_entity_or_link() -> None:
    assert clipped("ab&amp;cd", 6) == "ab…"
    assert clipped("a <http://x|y> b", 9) == "a …"
    assert clipped("short", 6) == "short"


# --- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (640, "640"),
        (0.41, "0.41"),
        (1560.4, "1,560"),
        (210_000, "2.1e5"),
        (0.0004, "4e-4"),
        (999.6, "1,000"),
        (0, "0"),
        (-3.25, "-3.25"),
        (math.nan, "NaN"),
        (math.inf, "infinite"),
        (None, "unknown"),
    ],
)
def test_numbers_have_three_digits(value: float | None, expected: str) -> None:
    assert number(value) == expected


@given(st.floats(-1e300, 1e300, allow_subnormal=False))
def test_a_number_reads_back_within_half_a_per_cent_or_its_second_digit(value: float) -> None:
    assert math.isclose(float(number(value).replace(",", "")), value, rel_tol=0.051, abs_tol=0.0)


def test_shares_and_factors() -> None:
    assert [percent(share) for share in (0.9991, 1.0, 0.0004, -0.0004, 0.306)] == [
        "99.9 %",
        "100 %",
        "< 0.1 %",
        "> -0.1 %",
        "30.6 %",
    ]
    assert factor(640, 0.41) == pytest.approx(1560.98, rel=1e-4)
    assert factor(640, 0.0) is None and factor(math.nan, 0.4) is None and factor(1.0, None) is None


def test_the_log_never_fails_on_an_event_of_a_newer_version() -> None:
    assert event_text("sent_to_the_moon", {}) == "sent to the moon"
    assert event_text("incident_opened", {}) == "Spike at step : grad norm NaN"


def test_a_norm_that_is_healthy_because_something_was_held_back_is_told_with_what_it_would_have_been(kit: Any) -> None:
    flag = m.Flag(rule="trainer:held", series="norm", value=0.43, score=1.05)
    spike = kit.Told().spike(1204, 0.43, flags=(flag,))
    waiting = plain(tell(story(kit, spike=spike)))
    assert "grad norm 0.43" in waiting and "positions held back by LayerClip" in waiting
    known = kit.a_finding()
    finding = known.model_copy(
        update={"fidelity": known.fidelity.model_copy(update={"held_at": "layers.1", "reported_norm": 0.43})}
    )
    text = plain(tell(story(kit, finding, spike=spike)))
    assert "held there by LayerClip; without it 640 (healthy 0.41, 1,560x)" in text
    assert "Fix that would have held" in text  # another remedy's
    layer_clip = finding.model_copy(update={"fix": m.Fix(name="LayerClip", norm_after=0.43, holds=True)})
    assert "Fix that held: LayerClip → norm 0.43" in plain(tell(story(kit, layer_clip, spike=spike)))
    assert "nan" not in text
