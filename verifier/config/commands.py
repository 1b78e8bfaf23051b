"""The commands of fsdp2 that reports suggest: written here alone, in words that it reads itself."""

import shlex
from collections.abc import Iterable, Sequence


def valued(option: str, value: str) -> list[str]:
    """The words of an option with a value: argparse takes one word that begins with a dash for
    another option.
    """
    alone = value.startswith("-") and " " not in value
    return [f"{option}={value}"] if alone else [option, value]


def with_checkpoints(words: Iterable[str], save: str, resume: str, args: Sequence[str] = ()) -> str:
    """The command that was given, with arguments to save and to resume. `words`: it without those
    of the script, which are `args`.
    """
    given = [*words, *valued("--save-args", save)]
    given += valued("--resume-args", resume) if resume else []
    return shlex.join([*given, *(["--", *args] if args else [])])


def explain(rule: str) -> str:
    """The command that prints the docs of a rule."""
    return f"fsdp2 explain {rule}"
