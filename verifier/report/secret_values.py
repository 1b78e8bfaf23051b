"""Which values stay beside the name of a credential: numbers, code, placeholders and prose."""

import re

HIDDEN = "***"
# What stands for no value, or says in a message how a credential was taken.
_ORDINARY = {
    *("none", "null", "nil", "true", "false", "yes", "no", "on", "off", "auto", "default"),
    *("undefined", "any", "bool", "bytes", "dict", "float", "int", "list", "object", "optional"),
    *("str", "string", "basic", "bearer", "digest", "denied", "empty", "error", "expired"),
    *("failed", "invalid", "missing", "not", "ok", "required", "set", "success", "unset"),
}
# What follows an option in a sentence: "give --token or set HF_TOKEN".
_PROSE = {
    *("a", "an", "and", "argument", "as", "at", "before", "by", "can", "cannot", "does", "flag"),
    *("for", "from", "has", "if", "in", "instead", "is", "may", "must", "needs", "not", "of"),
    *("on", "option", "or", "so", "that", "the", "then", "to", "value", "was", "when", "where"),
    *("which", "with", "without"),
}
_PLACEHOLDER = re.compile(
    r"\*+|\.{3}|<[^<>]*>|\{\w*\}|\$?\{\{[^{}]*\}\}|%s|%\(\w+\)s|\$\{?[A-Z_][A-Z0-9_]*\}?"
    r"|[xX]{3,}(?:-[xX]+)*"
)
_NUMBER = re.compile(
    r"[-+~]?(?:\d[\d_,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+|inf|nan|0x[0-9a-fA-F]{1,15})"
    r"(?:%|[a-zA-Z]{1,3})?"  # 80GiB, 12ms
)
_LONG_NUMBER = 16  # digits from which a number may be a key
# `token=get_token()`, `token=args.hub_token`; no digit and no capital, which passwords have
_CODE = re.compile(
    r"[a-z_][a-z_.]*[(\[]"
    r"|(?:args|cfg|cls|config|env|hparams|opts?|options|os|self|settings)\.[a-z_]"
)
# `self.auth = AuthHead(dim)`
_SPACED_CODE = re.compile(r"[A-Za-z_][\w.]*[(\[]|[A-Za-z_]\w*\.[A-Za-z_]")
_OPENS = ("(", "[", "{", ")", "]", "}", ",", "=", ":", "|", "/ ")
_SNAKE = re.compile(r"[a-z]+(?:_[a-z]+)*_\d{1,3}")
_DIGIT = re.compile(r"\d")
_DTYPE = re.compile(
    r"(?:bfloat|float|u?int|complex|cuda:?)\d+\w*"
    r"|(?:rank|step|layer|block|gpt|llama|line|python)\d+\w*"
)


def ordinary(value: str) -> bool:
    """Whether a value stands for none."""
    return not value or value.lower() in _ORDINARY or _PLACEHOLDER.fullmatch(value) is not None


def number(value: str) -> bool:
    """Whether a value is a number or an amount, and too short for a key."""
    return _NUMBER.fullmatch(value) is not None and sum(c.isdigit() for c in value) < _LONG_NUMBER


def structure(value: str) -> bool:
    """Whether a value is a list, a shape or no value at all."""
    return value.startswith(_OPENS)


def code(value: str, spaced: bool) -> bool:
    """Whether an unquoted value is an expression.

    `spaced`: blanks around `=`, as in code and not in an environment.
    """
    return bool((_SPACED_CODE if spaced else _CODE).match(value))


def prose(value: str) -> bool:
    """Whether this word goes on with a sentence."""
    return value.lower() in _PROSE


def random(value: str) -> bool:
    """Whether a value looks like a key: letters and digits, or long and in both cases."""
    if len(value) < 6 or _SNAKE.fullmatch(value) or _DTYPE.fullmatch(value):
        return False
    lower, upper = value.lower(), value.upper()
    if _DIGIT.search(value):
        return lower != upper  # a letter beside it
    return len(value) >= 12 and value != upper and value[1:] != lower[1:]


def piece_of_text(value: str) -> bool:
    """Whether a quoted value is a token of a vocabulary: `<s>`, `[CLS]`, `##ing`, a sign."""
    if len(value) < 2 or not value.isascii() or value[0] in "<[#":
        return True
    return not any(c.isalnum() for c in value)
