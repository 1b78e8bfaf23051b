"""Texts of a report that leave the user's machine: without source lines, paths and arguments.

Names of rules, functions, parameters and options stay, and numbers.
"""

import os
import re
from collections.abc import Iterator
from typing import Any

_GONE = "..."
_SPAN = re.compile(r"\(`.{1,400}?`\)|`[^`]{1,2000}+`")
# `fully_shard`, `.item()`, `ema.shadow['norm.weight']`, `--save-args`, `{checkpoint}`, `lr=0.1`
_NAME = re.compile(
    r"(?:-{0,2}|\.)[A-Za-z_][\w.-]*(?:\[(?:\d+|'[\w.-]+'|\"[\w.-]+\")\][\w.]*)*(?:\(\))?"
    r"|\{\w+\}|fsdp2 \w+|[A-Za-z_]\w*=(?:True|False|None|[\d.e-]+)"
)
# A call, with up to two calls in one another in it: of `grad.mul_(scale / norm)` the name stays.
_FLAT = r"[^()\n]{0,400}"
_INNER = rf"\({_FLAT}(?:\({_FLAT}\){_FLAT}){{0,9}}\)"
_CALL = re.compile(rf"(?<=\w)\({_FLAT}(?:{_INNER}{_FLAT}){{0,9}}\)")
# `S(0)`, `torch.Size([4, 4])`, `set_requires_gradient_sync(False)`, and the words `rank(s)`
_NO_CODE = re.compile(r"\((?:[\d., \[\]-]*|\w{1,2}|True|False|None)\)")
_OPTION = re.compile(r"(-{1,2}[A-Za-z][\w-]*)[ =].*", re.DOTALL)
# What an exception quotes: 'layers.0.weight' stays, 'my data/a.txt' does not.
_QUOTED = re.compile(r"(?<!\w)(['\"])(?![\w.:-]{0,200}\1)(?:(?!\1)[^\n]){1,400}\1(?!\w)")
_TRACEBACK = re.compile(r"(File \"[^\"\n]{0,500}\", line \d+(?:, in [^\n]{0,200})?)\n[^\n]*")
_INDENTED = re.compile(r"\n(?: {4}|\t)[^\n]*")
_HOME = re.compile(r"(?:/home|/Users)/[^/\s'\"`:,;)]+(?![^\s'\"`:,;)])")
# not that of `S(0)/R` and `{checkpoint}/a`
_PATH = re.compile(r"(?<![\w.@+~)}-])(?:~\w*|[\w.@+-]+)?(?:/[\w.@+-]+)+/?")
_FILE = re.compile(
    r"\.(?:py|pyi|ya?ml|json|jsonl|txt|pth?|bin|safetensors|np[yz]|toml|cfg|ini|sh|log|csv"
    r"|ckpt|parquet|distcp)$"
)
_SHORTEST = 4  # characters of a line or an argument that is looked for


def codes(value: Any) -> Iterator[str]:
    """Every source line that a JSON report quotes as such."""
    if isinstance(value, dict):
        if isinstance(value.get("code"), str):
            yield value["code"].strip()
        for item in value.values():
            yield from codes(item)
    elif isinstance(value, list):
        for item in value:
            yield from codes(item)


def private_words(report: dict[str, Any]) -> list[str]:
    """What is taken out wherever it stands, the longest first: source lines, folders, arguments."""
    target = report["target"]
    lines = {line for line in codes(report) if len(line) >= _SHORTEST and not line.isidentifier()}
    script = str(target.get("script") or "")
    folders = {str(target.get("cwd") or ""), os.path.dirname(script)}  # noqa: PTH120
    arguments = {value for word in words(target) for value in [word.rpartition("=")[2]]}
    # `train` and `4` are too ordinary: they are in sentences of ours
    arguments = {
        value
        for value in arguments
        if len(value) >= _SHORTEST
        and not value.startswith(("-", "{"))
        and not (value.isalpha() and value.islower())
        and not value.replace(".", "").isdigit()
    }
    folders = {folder.rstrip("/") + "/" for folder in folders if len(folder) > 1}
    return sorted(lines | arguments | folders, key=len, reverse=True)


def words(target: dict[str, Any]) -> list[str]:
    """The words of the script's arguments."""
    keys = ("args", "save_args", "resume_args", "single_args", "reshard_args")
    return " ".join(str(target.get(key) or "") for key in keys).replace("'", "").split()


def without_code(text: str, private: list[str]) -> str:
    """The text without the `private` words, and what else looks like code or a path."""
    for word in private:
        if word.endswith("/"):
            text = text.replace(word, "")
        elif word in text:
            text = re.sub(rf"(?<![\w.]){re.escape(word)}(?!\w)", _GONE, text)
    text = _INDENTED.sub(f"\n    {_GONE}", _TRACEBACK.sub(rf"\1\n    {_GONE}", text))
    text = _CALL.sub(_call, _SPAN.sub(_span, text))
    text = _QUOTED.sub(rf"\1{_GONE}\1", text)
    return _PATH.sub(_path, _HOME.sub("~", text))


def _span(found: re.Match[str]) -> str:
    """What stands in backquotes: a name, or code."""
    text = found[0]
    inner = text.strip("()").strip("`") if text.startswith("(") else text.strip("`")
    if _NAME.fullmatch(inner):
        return text
    option = _OPTION.fullmatch(inner)
    kept = f"`{option[1]} {_GONE}`" if option else f"`{_GONE}`"
    return f"({kept})" if text.startswith("(") else kept


def _call(found: re.Match[str]) -> str:
    return found[0] if _NO_CODE.fullmatch(found[0]) else f"({_GONE})"


def _path(found: re.Match[str]) -> str:
    """The name of the file or folder. `forward/backward` and `tokens/s` are no paths."""
    path = found[0].rstrip("/")
    one_slash = path.count("/") == 1 and not path.startswith(("~", "./"))
    return path if one_slash and not _FILE.search(path) else path.rpartition("/")[2]
