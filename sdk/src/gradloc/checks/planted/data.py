"""Planted faults of the data layer: one bad row among good ones, one bad tensor in a batch."""

import json
import math
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from gradloc.checks.batch import BatchSettings, check_batch
from gradloc.checks.data_rows import DataSettings, check_rows
from gradloc.checks.finding import CheckFinding
from gradloc.checks.planted import Garden
from gradloc.checks.rows import Row
from gradloc.checks.vocabulary import Vocabulary, vocabulary_of

GARDEN = Garden()
NUM_ROWS = 24
BAD_ROW = 9


@cache
def vocabulary() -> Vocabulary:
    """A small byte-level tokenizer: words of two letters and more are merged, so texts have several encodings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=400,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["add the numbers and think: the answer is 12"] * 8, trainer)
    return vocabulary_of(tokenizer)


@cache
def lossy_vocabulary() -> Vocabulary:
    """A word-level tokenizer that knows few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<pad>", "<eos>", "add", "and", "is", "the", "sum", *map(str, range(10))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return vocabulary_of(tokenizer)


def healthy_rows() -> list[dict[str, Any]]:
    """Rows of a rollout file: groups of four, all fields there, the end of text trained on."""
    rows = []
    for index in range(NUM_ROWS):
        ids = vocabulary().encoded([f" the answer is {index}"])[0]
        eos = vocabulary().special["<eos>"]
        rows.append(
            {
                "prompt": f"add the numbers {index // 4} and {index // 4 + 1}",
                "response": f" the answer is {index}",
                "reward": float(index % 3 == 0),
                "response_ids": [*ids, eos],
                "response_mask": [1] * (len(ids) + 1),
                "rollout_logp": [-0.5] * (len(ids) + 1),
            }
        )
    return rows


_SETTINGS = DataSettings(reward_range=(0.0, 1.0), tokens_max=64)


def _rows(faulty: bool, change: dict[str, Any] | None = None, drop: str | None = None) -> Iterable[CheckFinding]:
    rows = healthy_rows()
    if faulty:
        rows[BAD_ROW] |= change or {}
        if drop is not None:
            del rows[BAD_ROW][drop]
    numbered = [Row(number, values) for number, values in enumerate(rows)]
    return check_rows(numbered, _SETTINGS, vocabulary()).findings


def _plant_row(code: str, name: str, change: dict[str, Any]) -> None:
    GARDEN.plant(code, name)(lambda faulty: _rows(faulty, change))


_plant_row("data.empty-prompt", "a prompt of blanks", {"prompt": "  \n"})
_plant_row(
    "data.empty-response", "no response", {"response": "", "response_ids": [], "response_mask": [1], "rollout_logp": []}
)
_plant_row("data.too-long", "a prompt of a thousand words", {"prompt": "add the numbers " * 300})
_plant_row("data.nul-character", "a NUL in a prompt", {"prompt": "add the \0 numbers"})
_plant_row("data.control-character", "a bell in a prompt", {"prompt": "add the \a numbers"})
_plant_row("data.replacement-character", "wrongly decoded text", {"prompt": "add the \ufffd numbers"})
_plant_row("data.lone-surrogate", "half an emoji", {"prompt": "add the \ud83d numbers"})
_plant_row("data.reward-type", "a word as reward", {"reward": "good"})
_plant_row("data.reward-type", "null as reward", {"reward": None})
_plant_row("data.reward-non-finite", "NaN as reward", {"reward": math.nan})
_plant_row("data.reward-non-finite", "an infinite reward", {"reward": "inf"})
_plant_row("data.reward-range", "a reward of 1.5 in [0, 1]", {"reward": 1.5})
_plant_row("data.reward-outlier", "a reward of 1e5 among zeros and ones", {"reward": 1e5})
_plant_row("data.duplicate-prompt", "the first prompt again", {"prompt": "add the numbers 0 and 1"})
_plant_row("data.special-token-in-text", "an end of text inside a prompt", {"prompt": "add <eos> the numbers"})
_plant_row("data.id-out-of-range", "an id of 50,000", {"response_ids": [50_000]})
_plant_row("data.mask-misaligned", "a mask one too short", {"response_mask": [1, 1]})
_plant_row("data.mask-values", "a mask with a 2", {"response_mask": [2, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]})
_plant_row("data.non-finite", "a NaN logp", {"rollout_logp": [math.nan]})


@GARDEN.plant("data.field-missing", "a row without prompt")
def _field_missing(faulty: bool) -> Iterable[CheckFinding]:
    return _rows(faulty, drop="prompt")


@GARDEN.plant("data.field-missing", "a row without reward")
def _reward_missing(faulty: bool) -> Iterable[CheckFinding]:
    return _rows(faulty, drop="reward")


@GARDEN.plant("data.mask-empty", "a mask of zeros")
def _mask_empty(faulty: bool) -> Iterable[CheckFinding]:
    length = len(healthy_rows()[BAD_ROW]["response_ids"])
    return _rows(faulty, {"response_mask": [0] * length})


@GARDEN.plant("data.row-unreadable", "a torn line")
def _unreadable(faulty: bool) -> Iterable[CheckFinding]:
    import tempfile
    from pathlib import Path

    from gradloc.checks.rows import open_rows

    lines = [json.dumps(row) for row in healthy_rows()]
    if faulty:
        lines[BAD_ROW] = lines[BAD_ROW][:20]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_text("\n".join(lines))
        return check_rows(open_rows(path), _SETTINGS, vocabulary()).findings


@GARDEN.plant("data.retokenized", "a sampled split that encoding does not give")
def _retokenized(faulty: bool) -> Iterable[CheckFinding]:
    ids_of = vocabulary().ids_of
    letters = [ids_of[one] for one in "think"]
    change = {"response": "think", "response_ids": letters, "response_mask": [1] * 5, "rollout_logp": [-0.5] * 5}
    whole = vocabulary().encoded(["think"])[0]
    healthy = {**change, "response_ids": whole, "response_mask": [1] * len(whole), "rollout_logp": [-0.5] * len(whole)}
    return _rows(True, change if faulty else healthy)


@GARDEN.plant("data.text-lossy", "words that the tokenizer does not know")
def _lossy(faulty: bool) -> Iterable[CheckFinding]:
    rows = [{"prompt": f"add {i} and {i + 1}", "reward": float(i % 2)} for i in range(8)]
    if faulty:
        rows[3]["prompt"] = "add three and four"
    numbered = [Row(number, values) for number, values in enumerate(rows)]
    return check_rows(numbered, _SETTINGS, lossy_vocabulary()).findings


@GARDEN.plant("data.label-on-special", "padding in the loss mask")
def _label_on_special(faulty: bool) -> Iterable[CheckFinding]:
    row = healthy_rows()[BAD_ROW]
    pad = vocabulary().special["<pad>"]
    ids, mask = [*row["response_ids"], pad], [*row["response_mask"], int(faulty)]
    return _rows(True, {"response_ids": ids, "response_mask": mask, "rollout_logp": [-0.5] * len(ids)})


@GARDEN.plant("data.eos-unlabelled", "a loss mask that always ends one early")
def _eos_unlabelled(faulty: bool) -> Iterable[CheckFinding]:
    rows = healthy_rows()
    for row in rows:
        row["response_mask"][-1] = int(not faulty)
    numbered = [Row(number, values) for number, values in enumerate(rows)]
    return check_rows(numbered, _SETTINGS, vocabulary()).findings


# --- a collated batch -------------------------------------------------------------------------------

BATCH_SETTINGS = BatchSettings(vocabulary_size=400, pad_id=0, eos_id=1)


def healthy_batch() -> dict[str, Tensor]:
    """Two rows of six, padded on the right."""
    ids_BT = torch.tensor([[5, 6, 7, 8, 1, 0], [5, 6, 7, 8, 9, 1]])
    attention_BT = (ids_BT != 0).long()
    labels_BT = torch.where(attention_BT == 1, ids_BT, -100)
    return {
        "input_ids": ids_BT,
        "attention_mask": attention_BT,
        "labels": labels_BT,
        "rewards": torch.tensor([0.0, 1.0]),
    }


def _batch(faulty: bool, name: str, value: Tensor) -> Iterable[CheckFinding]:
    batch = healthy_batch()
    if faulty:
        batch[name] = value
    return check_batch(batch, BATCH_SETTINGS)


def _plant_batch(code: str, name: str, tensor: str, value: Tensor) -> None:
    GARDEN.plant(code, name)(lambda faulty: _batch(faulty, tensor, value))


_ATTENTION = healthy_batch()["attention_mask"]
_plant_batch("data.batch-non-finite", "a NaN reward", "rewards", torch.tensor([math.nan, 1.0]))
_plant_batch("data.batch-shape", "one reward too few", "rewards", torch.tensor([1.0]))
_plant_batch("data.batch-shape", "a mask one too short", "attention_mask", _ATTENTION[:, 1:])
_plant_batch("data.batch-device", "rewards on another device", "rewards", torch.zeros(2, device="meta"))
_plant_batch(
    "data.batch-mask-empty", "a row of zeros", "attention_mask", torch.stack([_ATTENTION[0] * 0, _ATTENTION[1]])
)
_plant_batch("data.batch-mask-values", "a mask with a 2", "attention_mask", _ATTENTION * 2)
_plant_batch("data.batch-id-range", "an id of 400", "input_ids", torch.full((2, 6), 400))
_plant_batch("data.batch-mask-hole", "a gap in a mask", "attention_mask", _ATTENTION * torch.tensor([1, 1, 0, 1, 1, 1]))
_plant_batch("data.batch-attends-padding", "attention on padding", "attention_mask", torch.ones_like(_ATTENTION))
_plant_batch("data.batch-label-on-padding", "labels on padding", "labels", healthy_batch()["input_ids"])
_plant_batch("data.batch-dtype", "ids as float", "input_ids", healthy_batch()["input_ids"].float())
