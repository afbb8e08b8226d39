"""Text from outside, fit for a line of a terminal, a log or a message. Pure."""


def visible(text: str, length_max: int | None = None) -> str:
    """`text` in one line, cut to `length_max` characters, with what does not print spelled out: control characters,
    escape sequences of terminals, marks that turn the direction of writing."""
    cut = text if length_max is None or len(text) <= length_max else text[: length_max - 1] + "…"
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in cut)
