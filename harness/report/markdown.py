"""Text from elsewhere, made safe for Markdown, XML and workflow commands."""

import re

ELLIPSIS = "…"
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
_BIDI = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_MARKDOWN = re.compile(r"([\\`*_\[\]<>|~#])")
_CODE = re.compile(r"((?<![`\\])`[^`]+`(?!`))")
"""A code span of single backticks; any other is taken for text."""
_ACTIVE = re.compile(r"[&@]|:(?=//)|\](?=[(\[:])|\bwww(?=\.)", re.IGNORECASE)
"""What makes entities, mentions, addresses, links and images of the text that follows."""
ZERO_WIDTH_SPACE = "\u200b"


def plain(text: str) -> str:
    """Without characters that a terminal or XML interprets, or that deceive the eye."""
    return _BIDI.sub("\N{REPLACEMENT CHARACTER}", _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def clipped(text: str, most: int) -> str:
    """At most `most` characters; the last one is an ellipsis if the text was longer."""
    return text if len(text) <= most else text[: most - 1] + ELLIPSIS


def cell(text: str, most: int = 300) -> str:
    """Text of a Markdown table's cell: one line, no markup, no link, no mention."""
    escaped = _MARKDOWN.sub(r"\\\1", clipped(" ".join(plain(text).split()), most))
    return _quiet(escaped)


def _quiet(text: str) -> str:
    """Text outside of code in which nothing links or notifies, whatever is escaped around it."""
    return _ACTIVE.sub(rf"\g<0>{ZERO_WIDTH_SPACE}", text)


def code(text: str, most: int = 300) -> str:
    """Text as code in a Markdown table's cell; a backtick in it becomes an apostrophe."""
    line = clipped(" ".join(plain(text).split()), most).replace("`", "'").replace("|", "\\|")
    return f"`{line}`" if line else ""


def table_cell(text: str) -> str:
    """Text that cannot break a Markdown table: a line without a bare pipe."""
    return re.sub(r"\\*\|", r"\\|", line(text))


def line(text: str) -> str:
    """Text on one line, with closed code spans; outside of them no HTML, link or mention."""
    text = " ".join(plain(text).split())
    parts = _CODE.split(text if text.count("`") % 2 == 0 else text.replace("`", "'"))
    parts[::2] = [_quiet(part).replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)


def fenced(text: str) -> str:
    """Text for a fenced block, which it cannot close."""
    return plain(text).replace("```", "'''")
