"""Claim: `gradloc check data` reads rows at half the bare tokenizer's speed or better, and its memory stays flat.

Both are timed in one run, alternating, on the same rows: the bare tokenizer encodes prompts and responses in batches
of the same size; the check reads the file, parses it and looks at everything. Memory is the process's resident set.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from gradloc.checks.data_rows import BATCH_ROWS, DataSettings, check_rows
from gradloc.checks.rows import open_rows
from gradloc.checks.vocabulary import Vocabulary, vocabulary_of

SENTENCE = (
    "let us find the sum of all numbers that divide twelve and then think about what remains when we add them so the "
    "answer must be even because each step keeps the parity of what came before and nothing else can change it"
)
WORDS = SENTENCE.split(" ")


def tokenizer() -> Vocabulary:
    """A byte-level BPE tokenizer trained on the rows' words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(
        vocab_size=1_000, special_tokens=["<pad>", "<eos>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([" ".join(WORDS)] * 10, trainer)
    return vocabulary_of(made)


def row(number: int, num_words: int) -> dict[str, object]:
    words = [WORDS[(number * 7 + 3 * index) % len(WORDS)] for index in range(num_words)]
    return {
        "prompt": f"question {number}: " + " ".join(words[: num_words // 4]),
        "response": " ".join(words),
        "reward": float(number % 3 == 0),
    }


def write(path: Path, num_rows: int, num_words: int) -> None:
    with path.open("w") as lines:
        for number in range(num_rows):
            lines.write(json.dumps(row(number, num_words)) + "\n")


def bare(texts: list[str], vocabulary: Vocabulary) -> float:
    """Seconds that the tokenizer alone needs."""
    started = time.perf_counter()
    for start in range(0, len(texts), 2 * BATCH_ROWS):
        vocabulary.encoded(texts[start : start + 2 * BATCH_ROWS])
    return time.perf_counter() - started


def resident_mib() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def speed(num_rows: int, num_words: int, repeats: int) -> dict[str, object]:
    vocabulary = tokenizer()
    texts = [str(one[name]) for i in range(num_rows) for one in [row(i, num_words)] for name in ("prompt", "response")]
    bare_s, check_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, num_rows, num_words)
        bare(texts[:2_000], vocabulary)
        for _ in range(repeats):
            bare_s.append(bare(texts, vocabulary))
            started = time.perf_counter()
            report = check_rows(open_rows(path), DataSettings(tokens_max=4_096, reward_range=(0, 1)), vocabulary)
            check_s.append(time.perf_counter() - started)
            assert not report.findings, report.findings
    ratios = [b / c for b, c in zip(bare_s, check_s, strict=True)]
    return {
        "benchmark": "check_data",
        "num_rows": num_rows,
        "tokens_per_row": round(report.counts["tokens"] / num_rows, 1),
        "bare_rows_per_s": round(num_rows / statistics.median(bare_s)),
        "check_rows_per_s": round(num_rows / statistics.median(check_s)),
        "speed_over_bare": round(statistics.median(ratios), 3),
        "speed_over_bare_min": round(min(ratios), 3),
    }


def memory(num_rows: int) -> dict[str, object]:
    """Resident memory at a tenth of the rows and at all of them."""
    vocabulary = tokenizer()
    seen: dict[int, float] = {}
    marks = (num_rows // 10, num_rows // 2, num_rows)

    def note(num: int) -> None:
        for mark in marks:
            if num >= mark and mark not in seen:
                seen[mark] = resident_mib()

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        write(path, num_rows, 12)
        check_rows(open_rows(path), DataSettings(tokens_max=4_096), vocabulary, note)
    figures = [round(seen[mark], 1) for mark in marks]
    return {
        "benchmark": "check_data_memory",
        "num_rows": num_rows,
        "resident_mib_at_tenth_half_all": figures,
        "growth_mib": round(figures[2] - figures[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rows", type=int, default=20_000, help="rows that are timed")
    parser.add_argument("--memory-rows", type=int, default=1_000_000, help="rows of the memory run; 0: none")
    options = parser.parse_args()
    figures = [speed(options.rows, num_words, repeats=3) for num_words in (60, 240)]
    if options.memory_rows:
        figures.append(memory(options.memory_rows))
    for figure in figures:
        text = json.dumps(figure) if options.json else ", ".join(f"{name} {value}" for name, value in figure.items())
        sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
