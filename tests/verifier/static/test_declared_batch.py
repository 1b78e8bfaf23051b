"""Which batch a script divides over its ranks, and what number it is given."""

import pytest

from verified_fsdp2.verifier.analysis.declared_batch import divided_batches
from verified_fsdp2.verifier.evidence import Sources


def divided(source: str, command: str = "") -> list[tuple[str, int, set[int]]]:
    sources = Sources({"/p/train.py": source}, ("/p/train.py",))
    return [(one.name, one.place.line, {*one.values}) for one in divided_batches(sources, command)]


@pytest.mark.parametrize(
    ("division", "found"),
    [
        ("args.global_batch // dist.get_world_size()", True),
        ("args.global_batch // micro // world * ring", True),
        ("args.global_batch // (micro * world)", True),
        ("args.global_batch // mesh.size(1)", True),
        ("args.global_batch // num_devices", True),
        ("args.global_batch // micro", False),
        ("args.global_batch * world", False),
        ("samples // world", False),
        ("args.micro_batch // world", False),
        ("args.eval_batch_size // world", False),
    ],
)
def test_a_division(division: str, found: bool) -> None:
    source = f"world = dist.get_world_size()\nadd('--global-batch', default=32)\nx = {division}\n"
    assert divided(source) == ([("global_batch", 3, {32})] if found else [])


@pytest.mark.parametrize(
    ("given", "command", "values"),
    [
        ("batch = 8", "", {8}),
        ("size, batch = 4, 8", "", {8}),
        ("class C:\n    batch: int = 8", "", {8}),
        ("def f(x, batch=8): ...", "", {8}),
        ("def f(*, batch=8): ...", "", {8}),
        ("c = {'batch': 8, 'rest': 9}", "", {8}),
        ("train(batch=8)", "", {8}),
        ("batch = read()", "train.py --batch 16", {16}),
        ("batch = read()", "train.py data.batch=16", {16}),
        ("batch = read()", "train.py --micro-batch 16", set()),
    ],
)
def test_what_it_is_given(given: str, command: str, values: set[int]) -> None:
    source = f"{given}\nrows = batch // dist.get_world_size()\n"
    assert [one[2] for one in divided(source, command)] == [values]


def test_the_batch_of_an_evaluation_is_another() -> None:
    source = "batch = 8\ndef evaluate():\n    return batch // dist.get_world_size()\n"
    assert divided(source) == []
