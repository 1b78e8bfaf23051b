"""Which names are those of a credential.

`HF_TOKEN`, `--hub-token` and `apiKey` are; `pad_token`, `tokens` and `auth.weight` are not.

In a training script `token` is an ordinary word, so its neighbour decides.
"""

import re
from enum import IntEnum
from functools import lru_cache


class Kind(IntEnum):
    """How surely a name is that of a credential."""

    NONE = 0
    TOKEN = 1  # `token`, `my_token`: a credential only if its value looks like one
    SECRET = 2
    PASSWORD = 3  # even a number is one


_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PASSWORD = re.compile(r"(?:password|passwd|passphrase|passcode|pwd)s?$")
_SECRET = re.compile(
    r"(?:secret|credential|(?:api|access|secret|private|auth|account)key)s?$"
    r"|(?:access|api|auth|bearer|github|gitlab|hf|hub|refresh|session|wandb)token$"
)
_AUTH = {"auth", "authorization", "oauth"}
# `auth`, `auth_header`, but not `auth_type` or `auth_proj`
_AFTER_AUTH = {"", "header", "key", "string", "value"}
# `db_pass`, but not `forward_pass`
_OF_PASS = {
    *("admin", "db", "ftp", "mail", "mongo", "mysql", "postgres", "redis", "root", "smtp", "ssh"),
    "user",
}
# `storage_key` and `shared_key` are not here: checkpoints and attention have keys of these names.
_OF_KEY = {
    *("access", "account", "anthropic", "api", "auth", "aws", "azure", "consumer", "deploy"),
    *("encryption", "hf", "hmac", "jwt", "license", "openai", "private", "secret", "service"),
    *("signing", "ssh", "subscription", "wandb"),
}
_OF_TOKEN = {
    *("access", "api", "auth", "azure", "aws", "bearer", "bot", "client", "clearml", "cloud"),
    *("comet", "csrf", "deploy", "docker", "face", "gh", "git", "github", "gitlab", "hf", "hub"),
    *("huggingface", "identity", "jwt", "login", "mlflow", "neptune", "npm", "oauth", "personal"),
    *("private", "push", "pypi", "refresh", "registry", "runner", "sas", "secret", "security"),
    *("session", "slack", "user", "wandb", "xsrf"),
}
# What a language model, a parser or a measurement calls a token.
_WORDS = {
    *("a", "an", "the", "this", "that", "each", "every", "one", "per", "next", "prev"),
    *("previous", "first", "last", "new", "current", "cur", "max", "min", "mean", "average"),
    *("total", "num", "number", "n", "same", "other", "added", "assistant", "audio", "blank"),
    *("bos", "byte", "class", "cls", "cost", "decoder", "dist", "distill", "distillation"),
    *("draft", "dummy", "empty", "end", "eod", "eom", "eos", "eot", "expert", "extra", "fim"),
    *("generated", "image", "img", "input", "key", "label", "latent", "loss", "mask", "masked"),
    *("memory", "middle", "oov", "output", "pad", "padding", "patch", "pooled", "position"),
    *("predicted", "prefix", "prompt", "query", "random", "rare", "register", "reserved", "role"),
    *("sampled", "sep", "sos", "source", "special", "start", "stop", "suffix", "target", "text"),
    *("think", "time", "tool", "unexpected", "unk", "unknown", "value", "video", "vision"),
    "word",
}
# `password_file` is where it lies, `secret_name` what it is called.
_ABOUT = {
    *("class", "count", "dir", "directory", "dim", "env", "exists", "expiry", "field", "file"),
    *("folder", "func", "function", "head", "ids", "index", "len", "length", "loss", "mask"),
    *("max", "method", "min", "mode", "module", "name", "names", "path", "policy", "prompt"),
    *("proj", "required", "scope", "size", "ttl", "type", "url"),
}


@lru_cache(maxsize=4096)
def kind_of(name: str, before: str = "") -> Kind:
    """What this name is. `before`: the word before it, as `API key: ...` is a name of two words."""
    names = name.strip("-._").split(".")
    # the attribute decides: `auth.weight` is a parameter; but `fs.s3a.secret.key` is one name
    last = ".".join(names[-2:]) if names[-1].lower() in ("key", "token") else names[-1]
    parts = [part.lower() for part in _PARTS.findall(last)]
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()  # `API_KEY_2`
    if parts in (["key"], ["token"]):
        parts = [*(part.lower() for part in _PARTS.findall(before)[-1:]), *parts]
    if not parts or parts[-1] in _ABOUT:
        return Kind.NONE
    if any(_PASSWORD.search(part) for part in parts):
        return Kind.PASSWORD
    pairs = list(zip(["", *parts], [*parts, ""], strict=True))
    if parts[-1] == "pass" and pairs[-2][0] in _OF_PASS:
        return Kind.PASSWORD
    if any(_SECRET.search(part) for part in parts):
        return Kind.SECRET
    if any(second in ("key", "keys") and first in _OF_KEY for first, second in pairs):
        return Kind.SECRET
    if any(first in _AUTH and second in _AFTER_AUTH for first, second in pairs):
        return Kind.SECRET
    return _token(pairs[-2][0]) if parts[-1] == "token" else Kind.NONE


def _token(qualifier: str) -> Kind:
    if qualifier in _OF_TOKEN:
        return Kind.SECRET
    return Kind.NONE if qualifier in _WORDS else Kind.TOKEN
