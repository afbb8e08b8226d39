"""Checks of data rows one by one, streaming: text, lengths, rewards, masks, token lists, repetition.

Row checks are bounded in memory whatever the number of rows. Prompts and responses appear in findings
by row, field and offset only, unless `show_text` asks for a short excerpt.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from gradloc.checks import row_lists
from gradloc.checks.finding import Report, Skipped, Tally, excerpt_of, finding
from gradloc.checks.repetition import Seen
from gradloc.checks.reward_spread import Spread
from gradloc.checks.row_text import PEEKED_ROWS, fields_of, number_of, required_of, text_of
from gradloc.checks.rows import Row
from gradloc.checks.vocabulary import Vocabulary

BATCH_ROWS = 512  # rows tokenized at once
ODD_CHARACTERS_MAX = 64  # looked at per text
TEMPLATE_SHARE = 0.5  # special tokens in more prompts than this are a template, not an accident
_ODD = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ufffd\ud800-\udfff]")
_TEXTS = ("prompt", "response")


@dataclass(frozen=True)
class DataSettings:
    """fields: meaning to field name where it is not one of row_text.NAMES. required: field names that every
    row must fill, besides those that most of the first rows fill. reward_range: declared bounds.
    tokens_max: prompt and response together."""

    fields: Mapping[str, str] = field(default_factory=dict)
    required: frozenset[str] = frozenset()
    reward_range: tuple[float, float] | None = None
    tokens_max: int | None = None
    show_text: bool = False


def check_rows(
    rows: Iterable[Row],
    settings: DataSettings | None = None,
    vocabulary: Vocabulary | None = None,
    on_progress: Callable[[int], None] = lambda _num_rows: None,
) -> Report:
    """Check all rows of a source; `on_progress` hears the number of rows read.

    Raises ValueError for rows in which no field has a known meaning.
    """
    settings = settings or DataSettings()
    stream = iter(rows)
    peeked = list(islice(stream, PEEKED_ROWS))
    readable = [row.values for row in peeked if row.problem is None]
    fields = fields_of(readable, settings.fields)
    if readable and not fields and not settings.required:
        names = ", ".join(sorted({str(name) for values in readable for name in values})[:8])
        raise ValueError(f"no field of a known name in the first rows ({names}); name them (--field prompt=NAME)")
    # A field that was named and that no row has must not pass in silence.
    required = settings.required | set(settings.fields.values()) | required_of(readable, fields)
    checker = _Checker(settings, vocabulary, fields, required)
    num_rows = 0
    for batch in _batches(chain(peeked, stream)):
        checker.add(batch)
        num_rows += len(batch)
        on_progress(num_rows)
    return checker.report(num_rows)


def _batches(rows: Iterator[Row]) -> Iterator[list[Row]]:
    while batch := list(islice(rows, BATCH_ROWS)):
        yield batch


@dataclass
class _Texts:
    """Texts of a batch that are worth tokenizing, each with its row and field."""

    rows: list[int] = field(default_factory=list)
    fields: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    is_chat: list[bool] = field(default_factory=list)


class _Checker:
    def __init__(
        self,
        settings: DataSettings,
        vocabulary: Vocabulary | None,
        fields: Mapping[str, str],
        required: frozenset[str],
    ) -> None:
        self._settings = settings
        self._vocabulary = vocabulary
        self._fields = fields
        self._required = required
        self._lists = row_lists.ListChecker(fields, vocabulary)
        self._tally = Tally()
        self._special_prompts = Tally()
        self._rewards = Spread()
        self._seen = Seen() if "prompt" in fields else None
        self._last_prompt: int | None = None
        self._run_start = 0
        self._before: tuple[int, int] | None = None
        self._num_prompts = 0
        self._num_prompts_special = 0
        self._num_tokens = 0
        self._not_encodable: str | None = None

    # --- one batch ------------------------------------------------------------------------------

    def add(self, rows: Sequence[Row]) -> None:
        texts = _Texts()
        for row in rows:
            if row.problem is not None:
                self._tally.add(finding("data.row-unreadable", row.problem, {"row": row.number}))
                continue
            for name in self._required:
                if row.values.get(name) is None and name != self._fields.get("reward"):
                    where: dict[str, int | str] = {"row": row.number, "field": name}
                    self._tally.add(finding("data.field-missing", f"no {name!r}", where), name)
            self._reward(row)
            for meaning in _TEXTS:
                self._text(row, meaning, texts)
            self._lists.add(row, self._tally)
        if self._vocabulary is not None and texts.texts:
            self._tokens(self._vocabulary, texts)

    def _reward(self, row: Row) -> None:
        name = self._fields.get("reward")
        if name is None or (name not in row.values and name not in self._required):
            return
        where: dict[str, int | str] = {"row": row.number, "field": name}
        if name not in row.values:
            self._tally.add(finding("data.field-missing", f"no {name!r}", where), name)
            return
        given = row.values[name]
        value = number_of(given)
        if value is None:
            what = "reward is null" if given is None else f"reward is a {type(given).__name__} that is no number"
            self._tally.add(finding("data.reward-type", what, where))
            return
        if not math.isfinite(value):
            self._tally.add(finding("data.reward-non-finite", f"reward is {value}", where, value=value))
            return
        self._rewards.add(value, row.number)
        bounds = self._settings.reward_range
        if bounds is not None and not bounds[0] <= value <= bounds[1]:
            what = f"reward {value:.6g} outside [{bounds[0]:.6g}, {bounds[1]:.6g}]"
            self._tally.add(finding("data.reward-range", what, where, value=value, low=bounds[0], high=bounds[1]))

    def _text(self, row: Row, meaning: str, texts: _Texts) -> None:
        name = self._fields.get(meaning)
        given = None if name is None else row.values.get(name)
        if name is None or given is None:
            return
        where: dict[str, int | str] = {"row": row.number, "field": name}
        text = text_of(given)
        if text is None:
            if meaning == "prompt" or not isinstance(given, list):
                what = f"{name!r} is a {type(given).__name__}; expected text or chat messages"
                self._tally.add(finding("data.field-missing", what, where), name)
            return
        if not text or text.isspace():
            self._tally.add(finding(f"data.empty-{meaning}", f"{name!r} holds no text", where))
        if _ODD.search(text) is not None and self._odd_characters(text, where):
            return  # half a surrogate pair cannot be tokenized
        if meaning == "prompt":
            self._repetition(row, text)
        texts.rows.append(row.number)
        texts.fields.append(meaning)
        texts.texts.append(text)
        texts.is_chat.append(isinstance(given, list))

    def _odd_characters(self, text: str, where: Mapping[str, int | str]) -> bool:
        """Report each kind of odd character once a text; True where a lone surrogate is among them."""
        seen: set[str] = set()
        for match in islice(_ODD.finditer(text), ODD_CHARACTERS_MAX):
            character = match.group()
            code = (
                "data.nul-character"
                if character == "\0"
                else "data.replacement-character"
                if character == "\ufffd"
                else "data.lone-surrogate"
                if "\ud800" <= character <= "\udfff"
                else "data.control-character"
            )
            if code not in seen:
                seen.add(code)
                excerpt = excerpt_of(text, match.start()) if self._settings.show_text else None
                place = {**where, "offset": match.start()}
                self._tally.add(finding(code, f"U+{ord(character):04X}", place, excerpt, codepoint=ord(character)))
        return "data.lone-surrogate" in seen

    def _repetition(self, row: Row, prompt: str) -> None:
        """The same prompt under another uid; without uids, under another run of neighbouring rows."""
        if self._seen is None:
            return
        fingerprint = hash(prompt)
        if fingerprint != self._last_prompt:
            # One odd row inside a group does not make two groups of it.
            resumes = self._before is not None and self._before[0] == fingerprint and row.number - self._run_start == 1
            start = self._before[1] if resumes and self._before is not None else row.number
            self._before = None if self._last_prompt is None else (self._last_prompt, self._run_start)
            self._last_prompt, self._run_start = fingerprint, start
        uid_field = self._fields.get("uid")
        uid = row.values.get(uid_field) if uid_field is not None else None
        group = self._run_start if uid is None else hash(str(uid))
        first = self._seen.first_row(prompt, group, row.number)
        if first is not None:
            where = {"row": row.number, "first_row": first}
            self._tally.add(finding("data.duplicate-prompt", f"prompt of row {first} again", where))

    def _tokens(self, vocabulary: Vocabulary, texts: _Texts) -> None:
        try:
            encoded = vocabulary.encoded(texts.texts)
        except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
            self._not_encodable = str(error)[:120]
            return
        decoded = vocabulary.decoded(encoded)
        lengths: dict[int, int] = {}
        for at, ids in enumerate(encoded):
            row, meaning, text = texts.rows[at], texts.fields[at], texts.texts[at]
            lengths[row] = lengths.get(row, 0) + len(ids)
            where: dict[str, int | str] = {"row": row, "field": self._fields[meaning]}
            inner = ids[:-1] if meaning == "response" else ids
            if not vocabulary.special_ids.isdisjoint(inner):
                self._special(vocabulary, inner, where, meaning, texts.is_chat[at])
            self._num_prompts += meaning == "prompt"
            if decoded[at] != text and not _alike(decoded[at], text):
                excerpt = excerpt_of(text) if self._settings.show_text else None
                self._tally.add(finding("data.text-lossy", "decoding gives another text", where, excerpt), meaning)
        limit = self._settings.tokens_max
        for row, length in lengths.items():
            self._num_tokens += length
            if limit is not None and length > limit:
                what = f"{length:,} tokens, at most {limit:,} fit"
                self._tally.add(finding("data.too-long", what, {"row": row}, num_tokens=length, limit=limit))

    def _special(
        self, vocabulary: Vocabulary, ids: Sequence[int], where: Mapping[str, int | str], meaning: str, is_chat: bool
    ) -> None:
        at = next(index for index, one in enumerate(ids) if one in vocabulary.special_ids)
        found = finding("data.special-token-in-text", f"token id {ids[at]}", {**where, "token": at}, token_id=ids[at])
        if meaning == "prompt" and not is_chat:
            self._num_prompts_special += 1
            self._special_prompts.add(found)  # a template's own tokens, if most prompts have them
        else:
            self._tally.add(found, meaning)

    # --- the end --------------------------------------------------------------------------------

    def report(self, num_rows: int) -> Report:
        if self._num_prompts_special <= TEMPLATE_SHARE * self._num_prompts:
            for one in self._special_prompts.findings():
                self._tally.add(one, "prompt")
        far, middle, span = self._rewards.outliers()
        for value, row in far:
            what = f"reward {value:.4g} where others span {span:.4g} around {middle:.4g}"
            place = {"row": row}
            self._tally.add(finding("data.reward-outlier", what, place, value=value, median=middle, span=span))
        self._lists.finish(self._tally)
        counts = {"rows": num_rows, "tokens": self._num_tokens, "rewards": self._rewards.num}
        return Report(self._tally.findings(), tuple(self._not_made(num_rows)), counts)

    def _not_made(self, num_rows: int) -> Iterator[Skipped]:
        if not num_rows:
            yield Skipped("all checks of rows", "the source holds no row")
        if self._vocabulary is None:
            yield Skipped("lengths in tokens, special tokens, retokenization", "no tokenizer was given (--tokenizer)")
        elif self._settings.tokens_max is None:
            yield Skipped("overlong rows", "no limit was given (--max-tokens)")
        if self._not_encodable:
            yield Skipped("tokens of some rows", f"the tokenizer refused them: {self._not_encodable}")
        for meaning in ("prompt", "response", "reward"):
            if meaning not in self._fields and num_rows:
                yield Skipped(f"{meaning}s", f"no field of a known name holds them (--field {meaning}=NAME)")
        if self._settings.reward_range is None and self._rewards.num:
            yield Skipped("range of rewards", "no range was declared (--reward-range LOW HIGH)")
        if self._seen is not None and self._seen.is_full:
            yield Skipped("repetition of later prompts", f"only the first {self._seen.num_tracked:,} are remembered")


def _alike(decoded: str, text: str) -> bool:
    """Alike but for white space and Unicode composition, which tokenizers normalise on purpose."""
    return _bare(decoded) == _bare(text)


def _bare(text: str) -> str:
    return "".join(unicodedata.normalize("NFC", text).split())
