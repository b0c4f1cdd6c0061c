"""Text of others, made safe to stand in Markdown, in XML and in a workflow command."""

import re

ELLIPSIS = "…"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#])")
ZERO_WIDTH_SPACE = "\u200b"


def plain(text: str) -> str:
    """Without what a terminal, XML or a reader's eye would take for something else."""
    return _BIDI.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def clipped(text: str, most: int) -> str:
    """At most so many characters, the last one an ellipsis where something is missing."""
    return text if len(text) <= most else text[: most - 1] + ELLIPSIS


def cell(text: str, most: int = 300) -> str:
    """Text of a Markdown table's cell: one line, no markup, no link, no mention."""
    line = clipped(" ".join(plain(text).split()), most)
    escaped = _MARKDOWN.sub(r"\\\1", line)
    # GitHub links bare addresses and notifies people whatever is escaped around them.
    quiet = escaped.replace("@", f"@{ZERO_WIDTH_SPACE}").replace("://", f":{ZERO_WIDTH_SPACE}//")
    return re.sub(r"\bwww\.", f"www{ZERO_WIDTH_SPACE}.", quiet, flags=re.IGNORECASE)


def code(text: str, most: int = 300) -> str:
    """Text as code in a Markdown table's cell; a backtick in it becomes an apostrophe."""
    line = clipped(" ".join(plain(text).split()), most).replace("`", "'").replace("|", "\\|")
    return f"`{line}`" if line else ""


def table_cell(text: str) -> str:
    """Text that cannot break a Markdown table: one line, no bare pipe, closed code spans."""
    text = re.sub(r"\\*\|", r"\\|", line(text))
    return text if text.count("`") % 2 == 0 else text.replace("`", "'")


def line(text: str) -> str:
    """Text on one line, with HTML defused."""
    return " ".join(text.split()).replace("<", "&lt;")
