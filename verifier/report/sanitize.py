"""Output of a script is data: in the log of a CI system it must command neither this system nor a
terminal.

The runner of GitHub Actions reads a line that begins with `::`, after any blanks, as a command, and
`##[` anywhere in a line (actions/runner, ActionCommand.cs); others read `##vso[` and `##teamcity[`.
Control and bidirectional characters move the cursor, forge lines, or reorder a text on the screen.
"""

import re

_FIRST = re.compile(r"^([^\S\n]*):(?=:)", re.M)
_BRACKET = re.compile(r"#(?=#\w*\[)")


def shown(text: str, kept: str = "\n\t") -> str:
    """The text with what is not printable as an escape: control, format and bidirectional
    characters, lone surrogates.
    """
    return "".join(c if c.isprintable() or c in kept else ascii(c)[1:-1] for c in text)


def sanitize(text: str) -> str:
    """Plain text in which nothing is a command: `: :error` and `# #[group]`; control characters as
    `\\x1b`.
    """
    text = shown(text)
    return _BRACKET.sub("# ", _FIRST.sub(r"\1: ", text))


def in_json(text: str) -> str:
    """The same JSON, written so that no line of it holds a command."""
    return _BRACKET.sub(r"\\u0023", text)


def in_xml(text: str) -> str:
    """The same XML, written so that no line of it is a command."""
    return _BRACKET.sub("&#35;", _FIRST.sub(r"\1&#58;", text))
