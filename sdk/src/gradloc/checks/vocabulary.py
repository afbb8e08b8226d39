"""A tokenizer as the checks use it: texts to ids in batches, ids to text, special ids, sides.

Wraps a `tokenizers.Tokenizer` or a fast Hugging Face tokenizer, or reads a tokenizer.json; nothing is
asked of a hub and no code of a model folder is run. The only door to tokenizers here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

_INSTALL = "pip install 'gradloc[checks]'"
_SIDED = ("padding_side", "truncation_side")


class TokenizerRejected(ValueError):
    """A tokenizer that cannot be used; the text says what was expected."""


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer without truncation, padding or added tokens: the true lengths of texts.

    backend: a tokenizers.Tokenizer. special: text to id of the special tokens. sides: "left" or "right" of
    padding_side and truncation_side, where known. roles: eos_token, pad_token, ... to text.
    """

    backend: Any
    sides: Mapping[str, str] = field(default_factory=dict)
    roles: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        return int(self.backend.get_vocab_size(with_added_tokens=True))

    @cached_property
    def ids_of(self) -> dict[str, int]:
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def id_bound(self) -> int:
        """One more than the largest id: with gaps in the ids it exceeds `size`."""
        return max(self.ids_of.values(), default=-1) + 1

    @cached_property
    def special(self) -> dict[str, int]:
        added = self.backend.get_added_tokens_decoder()
        return {token.content: int(index) for index, token in added.items() if token.special}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return frozenset(self.special.values())

    def role_id(self, role: str) -> int | None:
        """Id of "pad_token", "eos_token", ...; None where the tokenizer has none."""
        text = self.roles.get(role)
        return None if text is None else self.ids_of.get(text)

    def encoded(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, without tokens that a template would add."""
        return [one.ids for one in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decoded(self, ids: Sequence[Sequence[int]]) -> list[str]:
        return list(self.backend.decode_batch([list(one) for one in ids], skip_special_tokens=False))


def vocabulary_of(tokenizer: object) -> Vocabulary:
    """A tokenizer object as a Vocabulary; a copy, so the caller's own settings stay. Raises TokenizerRejected."""
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    to_str = getattr(backend, "to_str", None)
    if not callable(to_str):
        raise TokenizerRejected(
            f"tokenizer is a {type(tokenizer).__name__}; "
            "expected a tokenizers.Tokenizer or a fast Hugging Face tokenizer"
        )
    text = str(to_str())
    sides = {name: str(getattr(tokenizer, name)) for name in _SIDED if hasattr(tokenizer, name)}
    roles = {
        name: str(value)
        for name in ("pad_token", "eos_token", "bos_token", "unk_token")
        if (value := getattr(tokenizer, name, None)) is not None
    }
    return _from_json(text, sides, roles)


def read_vocabulary(path: Path) -> Vocabulary:
    """From tokenizer.json or a folder that holds one (and perhaps tokenizer_config.json). Raises TokenizerRejected."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise TokenizerRejected(f"no {file}; expected a tokenizer.json or a folder that holds one")
    sides: dict[str, str] = {}
    roles: dict[str, str] = {}
    config = file.with_name("tokenizer_config.json")
    if config.is_file():
        try:
            settings = json.loads(config.read_text())
        except ValueError:
            raise TokenizerRejected(f"{config} is not JSON; repair it or remove it") from None
        sides = {name: str(settings[name]) for name in _SIDED if settings.get(name)}
        for name in ("pad_token", "eos_token", "bos_token", "unk_token"):
            value = settings.get(name)
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                roles[name] = value
    return _from_json(file.read_text(), sides, roles)


def _from_json(text: str, sides: Mapping[str, str], roles: Mapping[str, str]) -> Vocabulary:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise TokenizerRejected(f"checks of tokens need the package tokenizers; {_INSTALL}") from None
    try:
        backend = Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the Rust library raises plain Exception
        raise TokenizerRejected(f"not a tokenizer.json: {str(error)[:120]}") from None
    found = dict(sides)
    if backend.padding is not None:
        found.setdefault("padding_side", str(backend.padding["direction"]))
    if backend.truncation is not None:
        found.setdefault("truncation_side", str(backend.truncation["direction"]))
    known = dict(roles)
    if backend.padding is not None:
        known.setdefault("pad_token", str(backend.padding["pad_token"]))
    for role, usual in (("pad_token", ("<pad>", "[PAD]")), ("eos_token", ("<eos>", "</s>"))):
        for candidate in usual:
            if role not in known and backend.token_to_id(candidate) is not None:
                known[role] = candidate
    backend.no_truncation()  # true lengths are wanted, and a stored truncation would hide them
    backend.no_padding()
    return Vocabulary(backend, found, known)
