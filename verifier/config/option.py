"""The settings that a script takes, and which of them look like save, resume and size."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

_SAVE = {
    "save",
    "saves",
    "saving",
    "checkpoint",
    "checkpoints",
    "checkpointing",
    "checkpointer",
    "ckpt",
    "snapshot",
    "dump",
}
_EVERY = {"every", "interval", "freq", "frequency", "steps", "iters", "period"}
_FOLDER = {"dir", "folder", "path", "directory", "root", "out", "output", "outdir", "dump", "file"}
_OWN = _SAVE | {
    "out",
    "output",
    "outdir",
    "run",
    "work",
    "workspace",
    "result",
    "results",
    "job",
    "local",
}
_NO_SAVE = {
    "activation",
    "gradient",
    "selective",
    "recompute",
    "ac",
    "wandb",
    "init",
    "keep",
    "best",
    "eval",
}
_OTHERS = {"data", "dataset", "tokenizer", "tok", "cache", "hf", "val", "train", "config"}
_OTHERS |= {"profile", "log", "logs", "plot", "trace"}
_SIZE = {
    "layers",
    "hidden",
    "dim",
    "width",
    "batch",
    "seq",
    "len",
    "length",
    "heads",
    "depth",
    "embd",
    "vocab",
    "size",
}
SET = "set:"  # before a key of a configuration file (settings.py; lint must not import its YAML)
_SAVE_AFTER = 3  # steps: early enough for a few more to be compared after a resume
PURPOSES = ("save", "folder", "resume", "steps", "size")


@dataclass(frozen=True)
class Option:
    """One setting: `name` as it is given ("--out", or "checkpoint.every" for `key=value`), and the
    line that declares it.
    """

    name: str
    flag: bool = False  # it takes no value
    default: str = ""  # as written in the sources, "" if there is none
    file: str = ""
    line: int = 0

    def given(self, value: str) -> str:
        """The setting on a command line."""
        if self.flag:
            return self.name
        return f"{self.name} {value}" if self.name.startswith("-") else f"{self.name}={value}"

    @property
    def switch(self) -> bool:
        """Whether it is on or off."""
        return self.flag or self.default in ("True", "False", "true", "false")

    @property
    def purpose(self) -> str:
        """What it looks like by its name: one of PURPOSES, or ""."""
        words = re.split(r"[._\-]+", self.name.removeprefix(SET).strip("-").lower())
        found, last = set(words), set(words[-2:])
        numbered = bool(found & {"step", "epoch", "iteration"})
        if found & _NO_SAVE:
            return ""
        if found & {"resume", "restore"} or (
            found & {"load", "from"} and found & _SAVE and not found & _OTHERS
        ):
            return (
                ""
                if numbered
                or last & (_EVERY | {"strategy", "only", "optimizer", "mode", "contents"})
                else "resume"
            )
        if found & _SAVE and last & _EVERY and not self.switch:
            return "save"
        counts = self.switch or re.fullmatch(r"[\d._]+", self.default)
        if words[-1] in _FOLDER and found & _OWN and not found & _OTHERS and not counts:
            return "folder"
        if found & _SAVE and (words[-1] in {*_SAVE, "enable", "enabled"}) and self.switch:
            return "save"
        if last & {"steps", "iters", "iterations"} and (
            len(words) == 1 or found & {"max", "num", "n", "total", "train"}
        ):
            return "steps"
        return (
            "size" if last & _SIZE and not self.switch and not found & _OTHERS - {"train"} else ""
        )


def by_purpose(options: Iterable[Option]) -> dict[str, list[Option]]:
    """{purpose: the options that look like it}, the plainest names first; options of no known
    purpose are left out.
    """
    found: dict[str, list[Option]] = {purpose: [] for purpose in PURPOSES}
    for option in options:
        if option.purpose and all(option.name != known.name for known in found[option.purpose]):
            found[option.purpose].append(option)
    return {
        purpose: sorted(known, key=lambda o: (o.switch, len(o.name)))
        for purpose, known in found.items()
        if known
    }


def suggested(options: Iterable[Option]) -> tuple[str, str]:
    """What `--save-args` and `--resume-args` could be; ("", "") where the options do not show
    it.
    """
    found = by_purpose(options)
    save, folder, resume = (found.get(purpose, []) for purpose in ("save", "folder", "resume"))
    place = [folder[0].given("{checkpoint}")] if folder else []
    often = [
        option.given("true" if option.switch else str(_SAVE_AFTER)) for option in _one_of_each(save)
    ]
    again = [resume[0].given("true" if resume[0].switch else "{checkpoint}")] if resume else []
    if not place or not (often or again):
        return "", ""
    return " ".join([*often, *place]), " ".join(
        [*place, *again] if not again or resume[0].switch else again
    )


def _one_of_each(options: list[Option]) -> list[Option]:
    """A setting that says how often, and one that turns it on."""
    kinds = {option.switch: option for option in reversed(options)}
    return [kinds[switch] for switch in sorted(kinds)]


def command(words: Iterable[str], options: Iterable[Option], args: Iterable[str]) -> str:
    """The command to copy that judges checkpoints, too; "" where the options do not show one."""
    save, resume = suggested(options)
    after = list(args)
    given = [
        *words,
        "--save-args",
        save,
        "--resume-args",
        resume,
        *(["--", *after] if after else []),
    ]
    return shlex.join(given) if save else ""
