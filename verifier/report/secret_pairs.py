"""Texts without the values beside the name of a credential: `NAME=value`, `--name value`.

Every repetition of a pattern is possessive or bounded, a name begins only where no other one goes
on, and what is looked at and stays is bounded: time is linear in the length of a text.
"""

import re

from .secret_names import Kind, kind_of
from .secret_values import HIDDEN, code, number, ordinary, piece_of_text, prose, random, structure

_NAMED = re.compile(
    r"(?<![\w.-])(?=[\w.-]*?(?:pass|pwd|secret|token|key|cred|auth))"
    r"(?P<name>[\w.-]++)"
    r"(?P<link>(?P<close>\\?[\"'`])?\]?[ \t]*+"
    r"(?P<sign>:[ \t]*(?:str|bytes|Optional\[str\]|str \| None)[ \t]*=(?!=)"  # `token: str = "..."`
    r"|[:=!]=|=>|:(?!//)|=)[ \t]*+"
    r"|[\"'],[ \t]*+(?=[\"'])|[ \t]++(?:is |was )?)",
    re.IGNORECASE,
)
_QUOTED = (
    r"(?:\"\"\"[^\"]*+\"\"\"|'''[^']*+'''|\"(?:[^\"\\\n]|\\.)*+\"|'(?:[^'\\\n]|\\.)*+'"
    r"|\\\"[^\"\\\n]*+\\\"|\\'[^'\\\n]*+\\'|`[^`\n]*+`)"
)
# Another field ends a value: `AccountKey=...;EndpointSuffix=...`.
_PIECE = r"(?:[^\s\"'`<>&,;]++|[,;](?![A-Za-z_][\w-]{0,60}=))++"
_VALUE = re.compile(
    rf"(?P<list>[(\[][ \t]*+{_QUOTED}(?:[ \t]*+,[ \t]*+{_QUOTED})*+[ \t]*+,?[ \t]*+[)\]])"
    rf"|[bBfFrRuU]{{0,2}}(?P<quoted>{_QUOTED}++)"
    # a quote ends the value, unless it goes on behind it: `pa'ss`
    r"|(?P<scheme>(?:Bearer|Basic|Token|Digest|ApiKey)[ \t]++)?[\"'`]?+"
    rf"(?P<bare>{_PIECE}(?:[\"'`](?![,;:.)\]}}]){_PIECE})*+)",
    re.IGNORECASE,
)
_DECIDES = 256  # characters of a value that say whether it is a credential


def without_value(name: str, value: str) -> str | None:
    """What is shown of a field of this name; None if its value is no credential by its name."""
    kind = kind_of(name)
    stays = kind is Kind.NONE or _stays_quoted(kind, value) or _current_folder(name, value)
    return None if stays else HIDDEN


def without_named(text: str) -> str:
    """The text without the values that stand beside the name of a credential."""
    parts: list[str] = []
    done = at = 0
    while (found := _NAMED.search(text, at)) is not None:
        at = found.end()
        name = found["name"]
        if name[0] in "nrt" and text[found.start() - 1 : found.start()] == "\\":
            name = name[1:]
        alone = name.lower() in ("key", "token")
        kind = kind_of(name, _word_before(text, found.start()) if alone else "")
        # a value that stays is searched for names in turn, so no more of it is looked at than this
        beginning = _VALUE.match(text, at, at + _DECIDES) if kind is not Kind.NONE else None
        if beginning is None or _stays(kind, found, beginning):
            continue
        value = _VALUE.match(text, at)
        start, end = _span(value or beginning)
        parts += [text[done:start], HIDDEN]
        done = at = end
    return "".join([*parts, text[done:]]) if parts else text


def _word_before(text: str, start: int) -> str:
    """The word that a single blank parts from the one that starts here: `API` of `API key`."""
    if text[start - 1 : start] != " ":
        return ""
    word = (text[max(0, start - 32) : start].split() or [""])[-1]
    return word if word[-1:].isalnum() else ""


def _stays(kind: Kind, found: re.Match[str], value: re.Match[str]) -> bool:
    """Whether the value beside a name is no credential."""
    sign, option = found["sign"], found["name"].startswith("-")
    if _current_folder(found["name"], value[0]):
        return True
    if sign is None and not option:
        # prose, but for `password 'hunter2'`; `"pwd", "secret"` is a list of names
        beside = found["link"][0] not in "\"'" and value["quoted"] is not None
        if kind < Kind.PASSWORD or not beside:
            return True
    if value["list"] is not None:
        return kind is Kind.TOKEN or sign is None
    if value["quoted"] is None:
        return _stays_bare(kind, found, value)
    inner = value["quoted"][_edge(value["quoted"]) : -_edge(value["quoted"])]
    # "unexpected token: 'x'" is a message, `{"token": "x"}` and `token="x"` are data
    message = sign == ":" and found["close"] is None and not option
    return _stays_quoted(kind, inner) or (kind is Kind.TOKEN and message and not random(inner))


def _span(value: re.Match[str]) -> tuple[int, int]:
    """What of a value is replaced: not its brackets and quotes, and not the full stop behind it."""
    if value["list"] is not None:
        return value.start() + 1, value.end() - 1
    if (quoted := value["quoted"]) is None:
        return value.start("bare"), value.start("bare") + len(_trimmed(value["bare"]))
    edge = _edge(quoted)
    # several pieces, as a shell writes `it's`
    several = quoted[0] in quoted[edge:-edge].replace("\\" + quoted[0], "")
    start, end = value.span("quoted")
    return (start, end) if several else (start + edge, end - edge)


def _edge(quoted: str) -> int:
    """The length of a quotation mark, which may be escaped or threefold."""
    if quoted.startswith(('"""', "'''")) and len(quoted) > 5:
        return 3
    return 2 if quoted[0] == "\\" else 1


def _trimmed(bare: str) -> str:
    return bare.rstrip(",;.:)]}") or bare


def _current_folder(name: str, value: str) -> bool:
    """Whether this is `PWD=/home/me`, in the environment of every shell."""
    return name.upper() in ("PWD", "OLDPWD") and value.lstrip("\"'").startswith("/")


def _stays_quoted(kind: Kind, value: str) -> bool:
    if ordinary(value) or (kind < Kind.PASSWORD and number(value)):
        return True
    return kind is Kind.TOKEN and piece_of_text(value)


def _stays_bare(kind: Kind, found: re.Match[str], value: re.Match[str]) -> bool:
    text = _trimmed(value["bare"])
    sign, option = found["sign"], found["name"].startswith("-")
    spaced = sign is not None and found["link"] != sign and sign != ":" and found["close"] is None
    if ordinary(text) or structure(text) or (kind < Kind.PASSWORD and number(text)):
        return True
    environment = found["name"].isupper() and not spaced
    if sign in ("==", "!=") or (not environment and code(text, spaced)):
        return True
    if option and sign is None:
        return text.startswith("-") or prose(text)
    if kind < Kind.PASSWORD and sign == ":" and _goes_on(found, value, text):
        return True
    return kind is Kind.TOKEN and (spaced or sign == ":") and not random(text)


def _goes_on(found: re.Match[str], value: re.Match[str], text: str) -> bool:
    """Whether this is a sentence such as "credentials: please log in"."""
    end = value.start("bare") + len(text)
    rest = found.string[end : end + 3].lstrip(",;")
    word = text.isalpha() and text.islower() and value[0] == value["bare"]
    apart = found["link"] != ":" and found["close"] is None
    return word and apart and rest[:1] == " " and rest[1:2].isalpha()
