"""Credentials that need no name beside them: keys of known shapes, in a URL, in a header."""

import re
from base64 import b64decode

from .secret_values import HIDDEN, ordinary, random

# No word goes on here; `\n` of a repr is two characters, the second a letter.
_START = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt])|(?<=%[0-9A-F]{2}))"
_SHAPES = re.compile(
    r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY-----"
    r"(?:[A-Za-z-]{1,20}: [^\n\\]{0,80}+(?:\\[nr]|\s)++)*+"  # the headers of one that is encrypted
    r"(?:(?:\\[nrt]|\s)*+[A-Za-z0-9+/=]{16,}+)*+"
    r"(?:(?:\\[nrt]|\s)*+[A-Za-z0-9+/=]{0,64}?(?:\\[nrt]|\s){0,4}"
    r"-----END [A-Z ]{0,30}PRIVATE KEY-----)?"
    r"|(?:hf|api_org|gh[oprsu]|npm|gsk|r8)_[A-Za-z0-9]{20,}+"
    r"|github_pat_\w{20,}+|[rs]k_(?:live|test)_[A-Za-z0-9]{16,}+"
    rf"|{_START}(?:(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{{16}}(?![0-9A-Za-z])"
    r"|xox[abceoprs]-[A-Za-z0-9-]{10,}+|(?:glpat|glptt|gldt|nvapi|pypi)-[\w-]{16,}+"
    r"|AIza[\w-]{30,}+|ya29\.[\w-]{20,}+|dapi[0-9a-f]{32}(?!\w)"
    r"|SG\.[\w-]{16,}+\.[\w-]{16,}+|eyJ[\w-]{8,}+\.eyJ[\w-]{4,}+(?:\.[\w-]*+)?)"
)
_OPENAI = re.compile(rf"{_START}sk-[\w-]{{16,}}+")
_IN_URL = re.compile(r"://([^\s/?#@'\"<>`:]{0,128}+)(:[^\s@'\"<>`]{0,128}+)?@")
_SIGNED = re.compile(
    r"([?&;](?:X-(?:Amz|Goog)-)?(?:Signature|sig|hmac|key)=)" r"([^\s&;'\"<>#`]++)",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"\b(Bearer|Basic)([ \t]+|%20|\+)([A-Za-z0-9._~+/=-]{6,}+)", re.IGNORECASE)
# A key of wandb is 40 hexadecimal digits, as the name of a commit is: the command decides.
_LOGIN = re.compile(
    r"(\bwandb[\W_]{1,3}login\W{1,4}(?:relogin\W{1,4})?(?:key\W{1,4})?)[0-9a-f]{20,}+"
    r"|(\blogin [^\s]{1,80}\s{1,9}password\s{1,9})[^\s'\")]++"  # of a .netrc
)


def without_keys(text: str) -> str:
    """The text without the credentials that need no name beside them."""
    text = _IN_URL.sub(_url, _SHAPES.sub(HIDDEN, text))
    text = _OPENAI.sub(_openai, _SIGNED.sub(_signed, text))
    text = _SCHEME.sub(_scheme, text)
    return _LOGIN.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}", text)


def _url(found: re.Match[str]) -> str:
    user, password = found[1], found[2]
    if password is None:  # `ssh://git@host` has no credential, a long user is one
        return found[0] if len(user) < 16 else f"://{HIDDEN}@"
    port = re.match(r":\d{0,5}/", password)  # `//host:8080/@me` has no user
    return found[0] if port else f"://{HIDDEN}@"


def _signed(found: re.Match[str]) -> str:
    short = found[1][1:].lower() == "key=" and len(found[2]) < 16  # `?key=loss` names a column
    return found[0] if short or ordinary(found[2]) else f"{found[1]}{HIDDEN}"


def _openai(found: re.Match[str]) -> str:
    """`sk-learn-based-pipeline` is a name: in a key one part is long and looks random."""
    parts = found[0].split("-")
    return HIDDEN if any(len(part) >= 16 and random(part) for part in parts) else found[0]


def _scheme(found: re.Match[str]) -> str:
    """A header: "Bearer tokens" and "basic training" are words."""
    scheme, blank, value = found.groups()
    if scheme.lower() == "bearer":
        return f"{scheme}{blank}{HIDDEN}" if random(value) else found[0]
    try:
        decoded = b64decode(value + "=" * (-len(value) % 4), validate=True)
    except ValueError:
        return found[0]
    return f"{scheme}{blank}{HIDDEN}" if b":" in decoded else found[0]
