"""Whose pictures are whose: read off placeholders for each way that models lay them out, or asked for by name."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import gradloc
from gradloc.model_inputs import Belonging, ModelInputs, check, model_inputs, placeholders_of
from gradloc.snapshot import open_snapshot

IMAGE, VIDEO = 90, 91
STAND_INS = {"image": IMAGE, "video": VIDEO}
WIDTH = 24


def ids_of(*rows: list[int]) -> Tensor:
    """Rows whose pictures have so many placeholders each, with a token between them."""
    ids_BT = torch.ones(len(rows), WIDTH, dtype=torch.int64)
    for row, sizes in enumerate(rows):
        at = 1
        for size in sizes:
            ids_BT[row, at : at + size] = IMAGE
            at += size + 1
    return ids_BT


def attributed(ids_BT: Tensor, given: dict[str, list[int]] | None = None, **tensors: Tensor) -> dict[str, Belonging]:
    return dict(model_inputs(tensors, given, STAND_INS).attributed(ids_BT).belongs)


def counts(*args: Tensor, **kwargs: Tensor) -> dict[str, tuple[int, ...]]:
    return {name: own.counts for name, own in attributed(*args, **kwargs).items()}  # type: ignore[arg-type]


def test_patches_are_counted_by_the_grid() -> None:
    """Qwen's: two pictures of 16 and 32 patches in one row, one of 8 in another, four patches a placeholder."""
    found = attributed(
        ids_of([], [4, 8], [2]),
        pixel_values=torch.zeros(56, 12),
        image_grid_thw=torch.tensor([[1, 4, 4], [1, 4, 8], [1, 2, 4]]),
        mm_token_type_ids=torch.zeros(3, WIDTH, dtype=torch.int32),
        position_ids=torch.zeros(3, 3, WIDTH, dtype=torch.int64),
    )
    assert found["image_grid_thw"] == Belonging("entries", (0, 2, 1))
    assert found["pixel_values"] == Belonging("entries", (0, 48, 8))
    assert found["mm_token_type_ids"].layout == "positions"
    assert found["position_ids"].layout == "axis-positions"


def test_pictures_of_one_size_need_nothing_between_them() -> None:
    ids_BT = ids_of([4], [], [4])
    ids_BT[1, 2:10] = IMAGE  # two, one after the other
    assert counts(ids_BT, pixel_values=torch.zeros(4, 3, 8, 8)) == {"pixel_values": (1, 2, 1)}


def test_pictures_of_many_sizes_are_runs() -> None:
    sizes = torch.tensor([[8, 8], [16, 8], [4, 4]])
    found = counts(ids_of([4], [], [8, 2]), pixel_values=torch.ones(3, 2, 3, 8, 8), image_sizes=sizes)
    assert found == {"pixel_values": (1, 0, 2), "image_sizes": (1, 0, 2)}


def test_a_first_dimension_that_happens_to_be_the_batchs_proves_nothing() -> None:
    ids_BT = ids_of([], [4], [4, 4])
    by_picture = attributed(ids_BT, pixel_values=torch.ones(3, 3, 8, 8))
    assert by_picture["pixel_values"] == Belonging("entries", (0, 1, 2))
    pixels = torch.ones(3, 2, 3, 8, 8)  # Idefics': [B, pictures, ...], zeros where a row has fewer
    pixels[0], pixels[1, 1] = 0, 0
    by_sequence = attributed(ids_BT, pixel_values=pixels, pixel_attention_mask=torch.ones(3, 2, 8, 8))
    assert {own.layout for own in by_sequence.values()} == {"sequences"}
    frames = attributed(ids_BT, pixel_values=torch.ones(3, 2, 3, 8, 8))
    assert frames["pixel_values"] == Belonging("entries", (0, 1, 2))


def test_what_the_trainer_says_is_taken_and_checked() -> None:
    ids_BT = torch.ones(3, WIDTH, dtype=torch.int64)
    audio = {"pixel_values": torch.zeros(5, 2)}
    assert attributed(ids_BT, {"pixel_values": [2, 0, 3]}, **audio)["pixel_values"].counts == (2, 0, 3)
    for wrong in ([2, 3], [2, 0, 2], [6, -1, 0]):
        with pytest.raises(ValueError, match=r"expected one count each, 5 in all"):
            attributed(ids_BT, {"pixel_values": wrong}, **audio)


@pytest.mark.parametrize(
    ("rows", "tensors"),
    [
        (([4], [4, 4]), {"pixel_values": torch.zeros(5, 3)}),  # three pictures, five entries
        (([], []), {"pixel_values": torch.zeros(5, 3)}),
        (([4], [2]), {"pixel_values": torch.zeros(16, 3), "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}),
        (([4], [4]), {"pixel_values": torch.zeros(9, 3), "image_grid_thw": torch.tensor([[1, 2, 4], [1, 2, 4]])}),
        (([4], [4]), {"pixel_values": torch.zeros(16, 3), "image_grid_thw": torch.tensor([[1, 2, 4], [-1, 2, 4]])}),
    ],
)
def test_what_cannot_be_told_is_an_error_and_no_guess(rows: tuple[list[int], ...], tensors: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match=r"cannot be told: .*entries=|expected as many|positive sizes"):
        attributed(ids_of(*rows), **tensors)


@settings(deadline=None)
@given(
    num_B=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    chosen=st.sets(st.integers(0, 4), min_size=1),
    end=st.integers(1, WIDTH),
)
def test_a_cut_has_the_entries_of_its_rows_in_order(num_B: list[int], chosen: set[int], end: int) -> None:
    rows = sorted(row for row in chosen if row < len(num_B)) or [0]
    ids_BT = ids_of(*([3] * num for num in num_B))
    owner_N = torch.tensor([row for row, num in enumerate(num_B) for _ in range(num)], dtype=torch.float32)
    tensors = {"token_type_ids": ids_BT.clone(), "position_ids": ids_BT.expand(3, -1, -1)}
    if len(owner_N):
        tensors["pixel_values"] = owner_N[:, None].expand(-1, 7)
    inputs = model_inputs(tensors, None, STAND_INS).attributed(ids_BT)
    part = inputs.cut(torch.tensor(rows), end)
    expected = [float(row) for row in rows for _ in range(num_B[row])]
    got = part.tensors["pixel_values"][:, 0].tolist() if "pixel_values" in part.tensors else []
    assert got == expected
    assert torch.equal(part.tensors["token_type_ids"], ids_BT[rows, :end])
    assert torch.equal(part.tensors["position_ids"], ids_BT.expand(3, -1, -1)[:, rows, :end])
    check(part, len(rows), end)


def test_a_picture_in_the_response_keeps_all_of_its_placeholders() -> None:
    ids_BT = ids_of([4], [4, 12])
    inputs = model_inputs({"pixel_values": torch.zeros(3, 3, 8, 8)}, {"pixel_values": [1, 2]}, STAND_INS)
    inputs = inputs.attributed(ids_BT)
    assert inputs.end_needed(ids_BT[:1], 3) == 6
    assert inputs.end_needed(ids_BT[1:], 8) == 19
    assert inputs.end_needed(ids_BT, 21) == 21
    unknown = model_inputs({"pixel_values": torch.zeros(3, 3)}, {"pixel_values": [1, 2]}, {}).attributed(ids_BT)
    assert unknown.end_needed(ids_BT, 3) == WIDTH


@pytest.mark.parametrize("name", ["input_ids", "labels", "use_cache", "__class__", "a.b", "", "x" * 99])
def test_names_that_are_none_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected a name such as pixel_values"):
        model_inputs({name: torch.zeros(3, 2)}, None, {})


def test_placeholders_are_those_of_the_configuration() -> None:
    config = {"image_token_index": 7, "video_token_id": 8, "audio_token_id": None, "image_seq_length": 9}
    assert placeholders_of(config) == {"image": 7, "video": 8}
    assert placeholders_of(None) == {}


class Seeing(nn.Module):
    """Adds the mean of a row's pictures to its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.vision = nn.Linear(4, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, ids_BT: Tensor, pixel_values: Tensor) -> Tensor:
        return self.head(self.embed(ids_BT) + self.vision(pixel_values)[:, None])  # type: ignore[no-any-return]


def seen(store: Path, *, given: bool = True, **watching: int) -> gradloc.Probe:
    """Eleven steps, the tenth a spike; every step's pictures have 96 bytes."""
    torch.manual_seed(0)
    model = Seeing()
    probe = gradloc.watch(model, run="run", store=str(store), reference_after=None, **watching)
    for step in range(11):
        ids_BT, pixels = torch.randint(0, 11, (6, 5)), torch.randn(6, 4)
        logits = model(ids_BT, pixel_values=pixels)[:, :-1]
        logp_BR = torch.log_softmax(logits, -1).gather(-1, ids_BT[:, 1:, None])[..., 0]
        more = {"model_inputs": {"pixel_values": pixels}} if given else {}
        probe.tokens(logp_BR, ids_BT, torch.ones_like(logp_BR), **more)  # type: ignore[arg-type]
        (logp_BR.mean() * (500 if step == 9 else 1)).backward()
        probe.observe()
        model.zero_grad()
    probe.close()
    return probe


def unusable(probe: gradloc.Probe) -> str | None:
    assert probe._writer is not None
    (record,) = open_snapshot(probe._writer.url(9)).manifest.parts[0].micro_batches
    assert record.inputs is not None
    return record.inputs.unusable


def test_pictures_within_the_bound_are_in_the_snapshot_and_the_last_step_alone_keeps_them(tmp_path: Path) -> None:
    probe = seen(tmp_path, model_inputs_bytes_max=96)
    assert unusable(probe) is None
    kept = [one.inputs.num_bytes for step in probe._ring for one in step.micro_batches if one.inputs is not None]
    assert kept == [0, 0, 0, 96]


def test_pictures_beyond_the_bound_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    probe = seen(tmp_path, model_inputs_bytes_max=95)
    assert "96 bytes of pixel_values in this step" in str(unusable(probe))
    assert sum(one.inputs.num_bytes for kept in probe._ring for one in kept.micro_batches if one.inputs) == 0
    assert len([one for one in caplog.records if "pixel_values" in one.message]) == 1, "said once, as training begins"


def test_pictures_that_the_model_got_and_the_probe_did_not_are_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADLOC_STRICT", "0")
    probe = seen(tmp_path, given=False)
    assert "pixel_values, which probe.tokens() was not given" in str(unusable(probe))
    assert len([one for one in caplog.records if "pixel_values" in one.message]) == 1


def test_inputs_that_cannot_be_used_say_why_and_hold_nothing() -> None:
    inputs = ModelInputs({"pixel_values": torch.zeros(3, 2)}).without_tensors("too large")
    assert (inputs.num_bytes, inputs.unusable) == (0, "too large")
    with pytest.raises(ValueError, match="expected a number of bytes"):
        gradloc.watch(nn.Linear(2, 2), run="run", model_inputs_bytes_max=-1)
