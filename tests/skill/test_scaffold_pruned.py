"""What a generated project keeps of the imports, constants and functions of the templates."""

from verified_fsdp2.skill.scaffold.pruned import pruned

TRAIN = '''"""Train."""
import os
import sys
from collections.abc import Callable, Iterable

from torch import nn
from helpers import LIMIT, first, spare
from missing import gone

UNUSED = spare
# What the
# loop takes.
STEPS = 3



def main(items: Iterable[int]) -> None:
    for item in items:
        first(item, STEPS)
def spare() -> None:
    """Its name is that of an import: the import goes."""
if __name__ == "__main__":
    main([os.getpid()])
'''
HELPERS = '''"""Helpers."""

from functools import cache, lru_cache, partial, reduce, singledispatch, total_ordering, wraps
LIMIT = 2


@cache
def first(item: int, steps: int) -> int:
    return partial(wraps, reduce, singledispatch, total_ordering, lru_cache)


# Only the next one calls it.
def second() -> None:
    third()


def third() -> None:
    second.__name__
'''
TESTS = '''"""Tests."""
import os

def test_nothing_is_called_by_name() -> None:
    pass
'''


def test_what_nothing_uses_goes_with_its_comments_and_blank_lines() -> None:
    files = {"train.py": TRAIN, "helpers.py": HELPERS, "tests/test_train.py": TESTS, "a.txt": "\n"}
    made = pruned(files)
    assert made["train.py"] == (
        '''"""Train."""

import os
from collections.abc import Iterable

from helpers import first

# What the
# loop takes.
STEPS = 3


def main(items: Iterable[int]) -> None:
    for item in items:
        first(item, STEPS)


if __name__ == "__main__":
    main([os.getpid()])
'''
    )
    assert "LIMIT" not in made["helpers.py"]
    assert "(\n    cache,\n" not in made["helpers.py"]  # all of it is used: as it was written
    tests = made["tests/test_train.py"]
    assert "def test_nothing" in tests and "os" not in tests
    assert made["a.txt"] == "\n"


def test_what_uses_nothing_but_each_other_stays() -> None:
    made = pruned({"helpers.py": HELPERS})["helpers.py"]
    assert "second" in made and "first" not in made and "functools" not in made
    assert "# Only the next one calls it." in made


def test_a_long_import_is_broken() -> None:
    names = [f"a_name_of_some_length_{number}" for number in range(5)]
    line = f"from somewhere.else_there import {', '.join([*names, 'unused'])}"
    made = pruned({"a.py": f"{line}\n\nprint({', '.join(names)})\n"})["a.py"]
    assert made.startswith("from somewhere.else_there import (\n    a_name_of_some_length_0,\n")
