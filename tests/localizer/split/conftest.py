"""Steps as snapshots, and processes that hold their model together."""

import pytest
import torch

SHARES = 1e-5


def places(finding):
    return [(one.rank, one.micro_batch, one.sequence, one.token) for one in finding.culprits]


def same(split, alone):
    assert (split.verdict, split.strategy, places(split)) == (alone.verdict, alone.strategy, places(alone))
    assert [cause.name for cause in split.causes] == [cause.name for cause in alone.causes]
    for one, other in zip(split.culprits, alone.culprits, strict=True):
        assert one.share == pytest.approx(other.share, abs=SHARES)
        assert one.norm == pytest.approx(other.norm, rel=SHARES)
    assert split.sequence_view.shares == pytest.approx(alone.sequence_view.shares, abs=SHARES)
    of_split, of_alone = (sorted(finding.shares_by_sequence) for finding in (split, alone))
    assert [entry[:3] for entry in of_split] == [entry[:3] for entry in of_alone]
    assert [entry[3] for entry in of_split] == pytest.approx([entry[3] for entry in of_alone], abs=SHARES)
    for name in ("norm_without", "grad_norm", "norm_without_relossed"):
        one, other = getattr(split.certificate, name), getattr(alone.certificate, name)
        assert one == (None if other is None else pytest.approx(other, rel=SHARES))
    kept = {"holds", "minimal", "num_culprits", "num_tokens_lower_bound"}
    assert split.certificate.model_dump(include=kept) == alone.certificate.model_dump(include=kept)


@pytest.fixture
def assert_same():
    """Verdict, places, causes, certificate; every share and norm within 1e-5."""
    return same


@pytest.fixture
def two_culprits(trainer):
    """Several questions follow each other."""
    return trainer.together(trainer.stale(9.0), trainer.stale(8.0, rank=0, row=1, column=4))


@pytest.fixture
def written(trainer, two_culprits, tmp_path):
    """The URL of a small step of this model."""

    def write(model: torch.nn.Module, fault=two_culprits) -> str:
        step = trainer.faulty(model, fault, num_rows=3, num_response=8)
        return str(step.write(f"file://{tmp_path}/run/0/7"))

    return write
