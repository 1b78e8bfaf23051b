"""The generated data.py: how it cuts samples, and that every rank gets its part of each global
batch and no more.
"""

import importlib
import multiprocessing
import os
import signal
import sys
import textwrap
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from data_project import IMPORTED, Project
from records import cases
from scripts import python, written

TEXT = b"0123456789" * 20
WORKERS = {"kind": "synthetic", "samples": 30, "workers": 2}
# From 3.12 on Python warns of any fork of a process that has threads.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
OWN_DATA = """
import torch

class Numbers:
    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3), torch.tensor((self.first + index) % 2)

def load(count=20):
    return Numbers(0, count), Numbers(count, 6)
"""


def text_data(project: Project, **keys: Any) -> ModuleType:
    (project.folder / "a.txt").write_bytes(TEXT)
    return project.load({"kind": "text", "files": ["a.txt"], "validation_fraction": 0.25, **keys})


def targets(samples: Sequence[Any], ignored: int) -> list[int]:
    return [t for i in range(len(samples)) for t in samples[i][1].tolist() if t != ignored]


def test_each_token_is_a_target_once_and_no_part_is_in_both(project: Project) -> None:
    (project.folder / "b.txt").write_bytes(b"second")
    data = text_data(project, files=["a.txt", "b.txt"], separator="<end>")
    assert bytes(data.read_tokens(data.find_files(data.FILES))) == TEXT + b"<end>second<end>"
    data = text_data(project)
    train, held_out = data.load_data(8)
    text = list(TEXT + b"\n")
    cut = len(text) - len(text) // 4
    assert targets(train, data.IGNORE_INDEX) == text[1:cut]
    assert targets(held_out, data.IGNORE_INDEX) == text[cut + 1 :]
    inputs, shifted = train[0]
    assert inputs.tolist() == text[:8] and shifted.tolist() == text[1:9]


def test_made_up_samples_can_be_learnt_and_are_always_the_same(project: Project) -> None:
    data = project.load({"kind": "synthetic", "samples": 40, "validation_fraction": 0.25})
    train, held_out = data.load_data(16, 256)
    assert (len(train), len(held_out)) == (30, 10)
    again, _ = data.load_data(16, 256)
    lengths = set()
    for index in range(30):
        inputs, shifted = train[index]
        valid = (shifted != data.IGNORE_INDEX).sum().item()
        lengths.add(valid)
        assert 8 <= valid <= 16 and (inputs[1:valid] == shifted[: valid - 1]).all()
        assert len(set((inputs.diff() % 64).tolist())) == 1
        assert (again[index][1] == shifted).all()
    assert len(lengths) > 1
    with pytest.raises(data.SetupError, match=r"^7 .* 8$"):
        data.GlobalBatches(range(7), 8, 1, 0)


def taken(
    project: Project, data: ModuleType, samples: Any, steps: range, world_size: int, micro: int
) -> list[Any]:
    """The samples of these steps, each in the order of the ranks, which must call the model equally
    often.
    """
    found: list[list[Any]] = [[] for _ in steps]
    for rank in range(world_size):
        project.rank(data, rank, world_size)
        loader = data.GlobalBatches(samples, 8, micro, 0)
        for number, step in enumerate(steps):
            batches = loader.micro_batches(8 * step)
            assert [len(part) for _, part in batches] == [micro] * (8 // (micro * world_size))
            found[number] += [
                row
                for pair in batches
                for row in zip(*(part.tolist() for part in pair), strict=True)
            ]
        loader.stream = None  # its workers end now, not when the garbage collector comes by
    return found


@forks
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_global_batch_does_not_depend_on_the_ranks(
    project: Project, world_size: int, workers: int
) -> None:
    data = project.load({"kind": "synthetic", "samples": 30, "workers": workers})
    train, _ = data.load_data(16, 256)
    steps = range(4)  # the last crosses the end of an epoch
    order = data.GlobalBatches(train, 8, 1, 0)
    wanted = [[train[index] for index in order.indices(8 * step, 0, 1)] for step in steps]
    expected = [[tuple(part.tolist() for part in sample) for sample in step] for step in wanted]
    assert taken(project, data, train, steps, world_size, 2) == expected


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_validation_reads_each_sample_once(project: Project, world_size: int) -> None:
    data = project.load({"kind": "synthetic", "samples": 30, "validation_fraction": 0.4})
    _, held_out = data.load_data(16, 256)
    for limit, count in ((1, 8), (4, 12)):
        seen, calls = [], set()
        for rank in range(world_size):
            project.rank(data, rank, world_size)
            batches = list(data.GlobalBatches(range(8), 8, 2, 0).fixed_batches(held_out, limit))
            calls.add(len(batches))
            seen += [row for _, part in batches for row in part.tolist() if max(row) >= 0]
        assert len(calls) == 1
        assert sorted(seen) == sorted(held_out[index][1].tolist() for index in range(count))


@forks
def test_workers_read_ahead_and_go_on_at_the_position_on_another_number_of_ranks(
    project: Project,
) -> None:
    """A run that is resumed, on more ranks and with other micro-batches, takes the positions of a
    straight one.
    """
    data = project.load(WORKERS)
    train, _ = data.load_data(16, 256)
    straight = taken(project, data, train, range(6), 1, 4)
    first, rest = (
        taken(project, data, train, range(2), 2, 2),
        taken(project, data, train, range(2, 6), 4, 1),
    )
    assert first + rest == straight

    project.rank(data, 1, 2)
    loader = data.GlobalBatches(train, 8, 2, 0)
    before = torch.get_rng_state()
    loader.micro_batches(0)
    stream = loader.stream
    loader.micro_batches(8)
    assert loader.stream is stream
    loader.micro_batches(8)  # as after a batch that was only tried
    assert loader.stream is not stream
    assert torch.equal(torch.get_rng_state(), before), (
        "the random numbers of training are left alone"
    )
    loader.stream = None


@forks
def test_a_sigterm_does_not_end_workers(project: Project) -> None:
    data = project.load(WORKERS)
    train, _ = data.load_data(16, 256)
    project.rank(data, 0, 1)
    loader = data.GlobalBatches(train, 8, 2, 0)
    loader.micro_batches(0)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    for step in range(1, 9):  # more than was read ahead
        loader.micro_batches(8 * step)
    assert all(worker.is_alive() for worker in workers)
    loader.stream = None


@pytest.mark.full
@pytest.mark.launch
def test_workers_end_with_their_rank(project: Project) -> None:
    """Daemons that ignore SIGTERM hang Python at exit; these do not."""
    project.load(WORKERS)
    script = """
        import torch.distributed as dist
        import data
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        loader = data.GlobalBatches(data.load_data(16, 256)[0], 8, 2, 0)
        loader.micro_batches(0)
        raise ValueError("the rank ends")
    """
    done = python(
        "-c", textwrap.dedent(script), cwd=project.folder / "project", status=1, timeout=60
    )
    assert done.stderr.count("Error") == 1


def write_own(project: Project, text: str) -> None:
    written(project.folder / "project", text, "own_data.py")
    project.monkeypatch.delitem(sys.modules, "own_data", raising=False)


def own_data(project: Project, **keys: Any) -> ModuleType:
    (project.folder / "project").mkdir()
    write_own(project, OWN_DATA)
    return project.load({"kind": "import", "import": "own_data:load", **keys}, IMPORTED)


@forks
@pytest.mark.parametrize("workers", [0, 2])
def test_own_samples_are_augmented_alike_on_any_number_of_ranks(
    project: Project, workers: int
) -> None:
    data = own_data(project, workers=workers, arguments={"count": 12})
    train, held_out = data.load_data(2)
    assert (len(train), len(held_out)) == (12, 6)
    before = torch.get_rng_state()

    steps = range(3)  # two epochs
    alone = taken(project, data, train, steps, 1, 2)
    assert (
        alone
        == taken(project, data, train, steps, 2, 1)
        == taken(project, data, train, steps, 4, 2)
    )
    assert len({tuple(pixels) for step in alone for pixels, _ in step}) == 24
    project.rank(data, 0, 1)
    first, second = (
        list(data.GlobalBatches(train, 8, 2, 0).fixed_batches(held_out, 1)) for _ in range(2)
    )
    assert [part.tolist() for part, _ in first] == [part.tolist() for part, _ in second]
    assert torch.equal(torch.get_rng_state(), before)


@cases(
    "returned, message",
    ("None", "must return training and validation samples"),
    ("[samples]", "must return training and validation samples"),
    ("samples, iter(samples)", "must be a sequence, not list_iterator"),
    ("samples, []", "no samples for training or for validation"),
    ("samples, [samples[0][:1]]", "must be two tensors, not Tensor"),
    ("samples, [(samples[0][0], 1)]", "must be two tensors, not Tensor, int"),
    ("samples, [(samples[0][0], torch.tensor(1.0))]", "must be int64, not torch.float32"),
    ("samples, [(samples[0][0], torch.tensor(2))]", "go from 2 to 2; 2 is the limit"),
)
def test_own_samples_that_training_cannot_use(
    project: Project, returned: str, message: str
) -> None:
    data = own_data(project)
    samples = "samples = [(torch.rand(3), torch.tensor(0))]"
    write_own(project, f"import torch\ndef load():\n    {samples}\n    return {returned}\n")
    importlib.invalidate_caches()
    with pytest.raises(data.SetupError, match=message):
        data.load_data(2)
    data = project.load(
        {"kind": "import", "import": "own_data:load"}, {**IMPORTED, "sequence_length": 3}
    )
    write_own(project, OWN_DATA)
    with pytest.raises(data.SetupError, match=r"must be \(3,\), not \(3,\) and \(\)"):
        data.load_data(3, 2)
