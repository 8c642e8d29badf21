"""Plain text of values, for messages, tables and cards. Knows nothing of what it writes."""


def byte_words(count: float) -> str:
    """Writes bytes in the largest unit of which there is one: `17.8 MB`, `336 MB`, `0 bytes`."""
    unit, scale = next((u for u in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= u[1]), ("bytes", 1.0))
    return f"{count / scale:,.{0 if count >= 100 * scale or scale == 1 else 1}f} {unit}"


def one_line(text: object) -> str:
    """Returns `text` on one line; blank runs become one space."""
    return " ".join(str(text).split())


def first_line(error: object) -> str:
    """Returns the first line of an error's message without its full stop; its type's name if it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def cut(value: object, limit: int) -> str:
    """Returns `value` as text; more than `limit` characters are cut, and said to be."""
    shown = str(value)
    return shown if len(shown) <= limit else f"{shown[:limit]}… ({len(shown) - limit:,} more characters)"
