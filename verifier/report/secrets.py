"""Texts without what looks like a credential. This decides for every report, and for the log.

Values beside the name of a credential are in secret_pairs.py, others in secret_shapes.py. Both
are imported when a text may hold a credential: most commands have none.
"""

# What a text with a credential holds, in lower case. Most texts end here.
_HINTS = (
    *("pass", "pwd", "secret", "token", "key", "cred", "auth", "bearer", "basic", "sig="),
    *("signature=", "hmac=", "wandb", "://", "eyj", "-----begin", "sk-", "sk_", "rk_", "gho_"),
    *("ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "hf_", "api_org_", "akia", "asia", "abia"),
    *("acca", "xox", "glpat", "glptt", "gldt", "aiza", "ya29", "npm_", "nvapi", "pypi-", "dapi"),
    *("gsk_", "r8_", "sg."),
)


def redact_secrets(text: str) -> str:
    """The text with `***` for what looks like a credential, in time linear in its length."""
    if not _may_hold_one(text):
        return text
    from .secret_pairs import without_named
    from .secret_shapes import without_keys

    return without_named(without_keys(text))


def redact_named(name: str, value: str) -> str:
    """The value of a field or an option of this name."""
    if not _may_hold_one(name):
        return redact_secrets(value)
    from .secret_pairs import without_value

    hidden = without_value(name, value)
    return redact_secrets(value) if hidden is None else hidden


def _may_hold_one(text: str) -> bool:
    lower = text.lower()
    return any(hint in lower for hint in _HINTS)
