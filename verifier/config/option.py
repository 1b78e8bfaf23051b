"""The settings that a script takes, and which of them look like save, resume and size."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from types import MappingProxyType

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
    "no",
    "not",
    "disable",
    "skip",
    "without",
}
_OTHERS = {"data", "dataset", "tokenizer", "tok", "cache", "hf", "val", "train", "config"}
_OTHERS |= {"profile", "log", "logs", "plot", "trace"}
_WEIGHTS = {"model", "weights", "pretrained", "base", "teacher"}
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
PLACE = "{checkpoint}"  # in arguments: one fresh folder
_FILES = {".pt", ".pth", ".ckpt", ".bin", ".tar", ".pkl", ".safetensors"}
SAVE_AFTER = 3  # steps: early enough for a few more to be compared after a resume
PURPOSES = ("save", "folder", "resume", "steps", "size")


@dataclass(frozen=True)
class Option:
    """One setting: `name` as it is given ("--out", or "checkpoint.every" for `key=value`), and the
    line that declares it.

    `takes`: "number", "choice", "switch", or "" for any value; `parsed`: a line that a run reaches
    declares it (`add_argument`).
    """

    name: str
    flag: bool = False  # it takes no value
    default: str = ""  # as written in the sources, "" if there is none
    file: str = ""
    line: int = 0
    takes: str = ""
    parsed: bool = False

    @property
    def key(self) -> str:
        """Its name in the sources: `save_every`, `checkpoint.every`."""
        return self.name.removeprefix(SET).lstrip("-").replace("-", "_")

    @property
    def settable(self) -> bool:
        """Whether a command line can give it: `set:` does not write TOML (settings.py)."""
        return not (self.name.startswith(SET) and self.file.endswith(".toml"))

    @property
    def shown(self) -> str:
        """It in a report: what a command line gives, else the key and its file."""
        return self.name if self.settable else f"{self.key} in {PurePath(self.file).name}"

    def given(self, value: str) -> str:
        """The setting on a command line; in a file, as TOML has it."""
        if not self.settable:
            plain = value in ("true", "false") or value.isdigit()
            return f"{self.key} = {value}" if plain else f'{self.key} = "{value}"'
        if self.flag:
            return self.name
        return f"{self.name} {value}" if self.name.startswith("-") else f"{self.name}={value}"

    @property
    def switch(self) -> bool:
        """Whether it is on or off."""
        known = self.flag or self.takes == "switch"
        return known or self.default in ("True", "False", "true", "false")

    @property
    def below(self) -> str:
        """The path below `{checkpoint}` that a folder, or the path of a file, is given."""
        name = PurePath(self.default).name
        of_a_file = PurePath(name).suffix in _FILES and not re.search(r"\s", name)
        return f"{PLACE}/{name}" if of_a_file else PLACE

    @property
    def purpose(self) -> str:
        """What it looks like by its name: one of PURPOSES, or ""."""
        words = re.split(r"[._\-]+", self.name.removeprefix(SET).strip("-").lower())
        found, last = set(words), set(words[-2:])
        numbered = bool(found & {"step", "epoch", "iteration"})
        if found & _NO_SAVE:
            return ""
        loads = "load" in found and (words[-1] in _FOLDER or len(words) == 1)
        if found & {"resume", "restore"} or (
            ((found & {"load", "from"} and found & _SAVE) or (loads and not found & _WEIGHTS))
            and not found & _OTHERS
        ):
            other = last & (_EVERY | {"strategy", "only", "optimizer", "mode", "contents"})
            counts = self.takes in ("number", "choice")
            return "" if numbered or other or counts else "resume"
        if found & _SAVE and last & _EVERY and not self.switch:
            return "" if self.takes == "choice" else "save"
        counts = self.switch or bool(self.takes or re.fullmatch(r"[\d._]+", self.default))
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


def suggested(
    options: Iterable[Option], gates: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, str]:
    """What `--save-args` and `--resume-args` could be; ("", "") where no option shows it."""
    save, resume = settings(options, gates)
    return " ".join(save), " ".join(resume)


def settings(
    options: Iterable[Option], gates: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """The settings with which a script saves, and those with which it resumes.

    `gates`: {option that a condition before the save reads: it with a value, "" if none is known}.
    """
    found = by_purpose(options)
    save, folder, resume = (
        sorted(found.get(purpose, []), key=lambda option: option.name not in gates)
        for purpose in ("save", "folder", "resume")
    )
    place = [folder[0].given(folder[0].below)] if folder else []
    chosen = _one_of_each(save)
    often = [option.given("true" if option.switch else str(SAVE_AFTER)) for option in chosen]
    known = {option.name for option in (*chosen, *folder[:1])}
    often += [words for name, words in gates.items() if words and name not in known]
    if not place or not (often or resume):
        return [], []
    if resume and not resume[0].switch:
        return [*often, *place], [resume[0].given(_saved_as(folder[0]))]
    return [*often, *place], [*place, *(option.given("true") for option in resume[:1])]


def _saved_as(place: Option) -> str:
    """The path that a resume is given; `{checkpoint}` where the name of the file has a number."""
    templated = any(mark in place.below.removeprefix(PLACE) for mark in "{%*")
    return PLACE if templated else place.below


def _one_of_each(options: list[Option]) -> list[Option]:
    """A setting that says how often, and one that turns it on."""
    kinds = {option.switch: option for option in reversed(options)}
    # Beside a number of steps a switch of this name is for torch.cuda.memory (FSDPToys).
    if len(kinds) > 1 and kinds[True].key == "snapshot":
        del kinds[True]
    return [kinds[switch] for switch in sorted(kinds)]
