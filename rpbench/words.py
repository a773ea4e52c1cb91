"""Words of others in what we say: no control characters, which a terminal would obey, and an end."""

MOST = 2000  # characters of a message


def plain(text: str, most: int = MOST) -> str:
    """The text with whatever does not print escaped, but for ends of lines; its middle is left out if it is long."""
    if len(text) > most:
        text = f"{text[: most // 2]} [...] {text[-most // 2 :]}"
    return "".join(
        mark if mark.isprintable() or mark == "\n" else mark.encode("unicode_escape").decode() for mark in text
    )
