"""The limit of a piece of a step falls with the root of its tokens."""

import math
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradloc_proto import rules

norms = st.floats(1e-6, 1e6)
counts = st.integers(1, 100_000)


@given(norms, counts, counts, st.sampled_from(get_args(rules.Level)))
def test_the_limit_falls_as_the_search_descends(norm, one, other, level):
    small, large = sorted((one, other))
    limit = rules.segment_limit(norm, small, large, level)
    assert limit == pytest.approx(rules.LEVEL_FACTOR[level] * norm * math.sqrt(small / large))
    assert limit <= rules.segment_limit(norm, large, large, level)


@given(norms, counts, st.floats(0.1, 10))
def test_the_scale_and_the_healthy_norm_are_factors(norm, tokens, scale):
    one = rules.segment_limit(norm, 1, tokens, "token", scale=scale)
    assert one == pytest.approx(scale * rules.segment_limit(norm, 1, tokens, "token"))
    assert 2 * one == pytest.approx(rules.segment_limit(2 * norm, 1, tokens, "token", scale=scale))


def test_healthy_pieces_of_orthogonal_gradients_stay_under_their_limits_and_a_culprit_does_not():
    generator = np.random.default_rng(0)
    gradients = generator.normal(size=(256, 4000)) * np.exp(0.3 * generator.normal(size=(256, 1)))
    healthy = float(np.linalg.norm(gradients.sum(axis=0)))
    for level, size in (("token", 1), ("sequence", 16), ("micro-batch", 64), ("rank", 128), ("step", 256)):
        pieces = np.linalg.norm(gradients.reshape(-1, size, 4000).sum(axis=1), axis=1)
        assert (pieces < rules.segment_limit(healthy, size, 256, level)).all()
    limit = rules.segment_limit(healthy, 256, 256, "step")
    culprit = gradients[7] / np.linalg.norm(gradients[7]) * 1.2 * rules.smallest_detectable(healthy, limit)
    assert np.linalg.norm(gradients.sum(axis=0) + culprit) > limit
    assert np.linalg.norm(culprit) > rules.segment_limit(healthy, 1, 256, "token")


def test_an_empty_piece_may_have_no_gradient():
    assert rules.segment_limit(1.0, 0, 10, "sequence") == 0.0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((math.nan, 1, 2), "healthy norm nan"),
        ((math.inf, 1, 2), "healthy norm inf"),
        ((0.0, 1, 2), "healthy norm 0"),
        ((1.0, 3, 2), "3 of 2 tokens"),
        ((1.0, -1, 2), "-1 of 2 tokens"),
        ((1.0, 0, 0), "0 of 0 tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        rules.segment_limit(*arguments)
