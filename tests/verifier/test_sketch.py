"""Sketches add up over shards, see any difference, and row hashes do not depend on how rows are
grouped.
"""

import math
from collections import UserDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from records import cases
from verified_fsdp2.verifier.probe import tensor_fingerprint as module
from verified_fsdp2.verifier.probe.compat.tensors import tensors
from verified_fsdp2.verifier.probe.events.recompute import hashed
from verified_fsdp2.verifier.probe.events.state import _token
from verified_fsdp2.verifier.probe.measures import element_hash
from verified_fsdp2.verifier.probe.reachable_values import Walk
from verified_fsdp2.verifier.probe.tensor_fingerprint import row_hashes, sketch
from verified_fsdp2.verifier.trace import difference


def shards_of(
    tensor: torch.Tensor, dim: int, parts: int, monkeypatch: pytest.MonkeyPatch
) -> list[list[float]]:
    """The sketches of the parts of a tensor, as ranks would take them of a DTensor sharded on
    `dim`.
    """
    out, start = [], 0
    for part in tensor.tensor_split(parts, dim=dim):
        offset = [0] * tensor.dim()
        offset[dim] = start
        start += part.shape[dim]
        box = (tuple(tensor.shape), tuple(part.shape), tuple(offset))
        monkeypatch.setattr(module.tensors, "box", lambda _, box=box: box)
        out.append(sketch(part))
    monkeypatch.undo()
    return out


@pytest.mark.parametrize(
    ("shape", "dim", "parts"), [((7, 5), 0, 2), ((7, 5), 0, 9), ((6, 4, 3), 1, 4), ((11,), 0, 3)]
)
def test_the_shards_add_up_to_the_whole(shape, dim, parts, monkeypatch) -> None:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    total = [
        math.fsum(column)
        for column in zip(*shards_of(tensor, dim, parts, monkeypatch), strict=True)
    ]
    assert total == pytest.approx(sketch(tensor), rel=1e-12)


def test_the_estimate_of_a_difference_is_near_the_truth() -> None:
    stream = torch.Generator().manual_seed(1)
    a = torch.randn(200, 50, generator=stream)
    ratios = []
    for _ in range(50):
        b = a + 1e-3 * torch.randn(a.shape, generator=stream)
        ratios.append(difference(sketch(a), sketch(b)) / float((a - b).norm()))
    assert 0.8 < sum(ratios) / len(ratios) < 1.2
    assert min(ratios) > 0.1


def test_a_permutation_shows() -> None:
    tensor = torch.randn(16, 8, generator=torch.Generator().manual_seed(2))
    assert difference(sketch(tensor), sketch(tensor.flip(0))) > 0.1 * float(tensor.norm())
    assert sketch(torch.empty(0, 4)) == [0.0] * 5


SHAPES = [(7, 5), (64,), (1, 1, 97), (3, 40, 5), (200, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("strided", [False, True])
def test_blocks_add_up_to_the_whole(
    shape: tuple[int, ...], strided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = torch.Generator().manual_seed(4)
    tensor = (
        torch.randn(shape[::-1], generator=stream).permute(*range(len(shape))[::-1])
        if strided
        else None
    )
    tensor = torch.randn(shape, generator=stream) if tensor is None else tensor
    whole = sketch(tensor)
    monkeypatch.setattr(module, "_BLOCK", 16)
    monkeypatch.setattr(module, "_cache", {})
    assert sketch(tensor) == pytest.approx(whole, rel=1e-12, abs=1e-12)


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes, views left out."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not func.is_view:
            self.most = max(self.most, made.numel())
        return made


@pytest.mark.parametrize("strided", [False, True])
def test_a_large_tensor_needs_little_memory(strided: bool) -> None:
    tensor = torch.ones(1024, 1500).t() if strided else torch.ones(1500, 1024)
    with Largest() as seen:
        sketch(tensor)
    assert seen.most <= module._BLOCK * module.PROBES
    assert sum(kept.shape[1] for kept in module._cache.values()) <= module._CACHE_LIMIT


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.bool])
def test_rows_hash_alike_in_any_batch(dtype) -> None:
    rows = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(3)).to(dtype)
    whole = row_hashes([rows])
    assert whole == [h for part in rows.split(3) for h in row_hashes([part])]
    if dtype != torch.bool:
        assert len(set(whole)) == 8


def test_rows_take_in_every_tensor_of_the_batch() -> None:
    inputs, labels = torch.arange(12).reshape(4, 3), torch.arange(4)
    assert row_hashes([inputs, labels]) != row_hashes([inputs, labels + 1])
    assert row_hashes([inputs, torch.zeros(())]) == row_hashes([inputs])
    assert row_hashes([]) == []


@cases("pad", 0, -100, 7)
def test_a_row_has_one_hash_however_far_it_is_padded(pad: int) -> None:
    """Ranks pad to the longest row of their own; where `pad` also ends a sentence, each row has
    one.
    """
    end = [pad] if pad > 0 else []
    rows = [[3, 1, 4, *end], [1, 5, *end], [*end]]
    short, long = (
        torch.tensor([row + [pad] * (size - len(row)) for row in rows]) for size in (4, 9)
    )
    assert row_hashes([short]) == row_hashes([long]) and len(set(row_hashes([short]))) == 3
    images = torch.tensor([[0, 5, 5, 5], [0, 0, 5, 5], [5, 5, 5, 5], [0, 5, 5, 0], [0, 0, 0, 5]])
    assert len(set(row_hashes([images]))) == len(images), "of one length, rows differ as before"
    assert row_hashes([torch.zeros(2, 0)]) == [0, 0]
    points = torch.tensor([[-0.5], [-0.7], [0.0], [0.7], [-1.0]])
    assert (
        len(set(row_hashes([points])))
        == len(points)
        == len(set(row_hashes([torch.ones(5, 1), points])))
    )
    assert len(set(row_hashes([torch.tensor([[-1], [0], [1], [-2], [-100]])]))) == 5
    ids = torch.arange(12).reshape(3, 4)
    mask = ids > 4
    batch = [ids, ids + 1, mask, ids.float(), ids * 2, mask]
    hashes = row_hashes(batch)
    assert len(set(hashes)) == 3
    assert row_hashes([part[1:] for part in batch]) == hashes[1:]
    assert row_hashes([*batch[:2], ~mask, *batch[3:]]) != hashes


def test_a_complex_tensor_counts_with_both_its_parts() -> None:
    assert sketch(torch.tensor([3.0 + 4.0j]))[0] == 25.0


def test_nested_tensors_of_a_training_loop_are_read_as_their_values() -> None:
    walk = Walk(SimpleNamespace(all_slots=list, roots=[]))  # type: ignore[arg-type]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    ((path, _, values),) = walk._walk(nested, "batch", "local", 0)
    assert path == "batch" and sketch(values)[0] == 5.0


def test_no_two_biases_of_experts_are_taken_for_one_value() -> None:
    """Biases that rise and fall by one rate add up to 0, weighted by 1, 2, 3 and 4 too: [-1, 1, 1,
    -1] is not [0, 0, 0, 0].
    """
    biases = torch.cartesian_prod(*[torch.arange(-3.0, 4.0)] * 4) * 0.001
    assert len({_token(bias) for bias in biases}) == 7**4


@dataclass
class Batch:
    rows: Any
    other: Any = None


def test_the_samples_of_a_model_may_be_in_a_dataclass() -> None:
    one, two = torch.ones(2), torch.zeros(3)
    batch = Batch(one, UserDict({"x": [two], "name": "n"}))
    assert [id(t) for t in tensors((batch, 1))] == [id(one), id(two)]
    batch.other = batch  # as a tree whose nodes know their parents
    assert all(t is one for t in tensors(batch)) and tensors((Batch, nn.Linear(2, 2))) == []


class Halves(torch.Tensor):
    """A tensor without memory of its own: two others hold its numbers, as quantised state does."""

    @staticmethod
    def __new__(cls, *parts: torch.Tensor) -> "Halves":
        return torch.Tensor._make_wrapper_subclass(cls, (2 * len(parts[0]),), dtype=torch.float32)

    def __init__(self, *parts: torch.Tensor) -> None:
        self.a, self.b = parts

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].a, args[0].b)
        raise NotImplementedError(function)


class Readable(Halves):
    def dequantize(self) -> torch.Tensor:
        return torch.cat([self.a, self.b])


def test_tensors_that_hold_others_are_sketched_by_these() -> None:
    a, b = torch.rand(3), torch.rand(3)
    assert sketch(Readable(a, b)) == sketch(torch.cat([a, b])) == sketch(Halves(a, b))
    assert sketch(Halves(a, torch.zeros(1))) != sketch(Halves(a, torch.ones(1)))


@cases("dtype", torch.float32, torch.bfloat16, torch.bool, torch.complex64)
@cases("shape", (), (3, 5), (400, 300))
def test_a_change_of_one_element_changes_the_hash(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    tensor = torch.ones(shape).to(dtype)
    before = element_hash(tensor)
    assert element_hash(tensor.clone()) == before
    tensor.reshape(-1)[0] = 0
    assert element_hash(tensor) != before


def test_a_hash_of_what_is_not_in_a_row_or_not_a_number() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert element_hash(tensor.t()) == element_hash(tensor.t().contiguous()) != element_hash(tensor)
    assert element_hash(torch.arange(6)[::2]) == element_hash(torch.tensor([0, 2, 4]))
    assert element_hash(torch.tensor([1.0, torch.nan])) == element_hash(
        torch.tensor([1.0, torch.nan])
    )
    assert element_hash(torch.nn.Parameter(tensor)) == element_hash(tensor)


def test_states_of_a_generator_have_numbers_of_their_own() -> None:
    """An evaluation that seeds the generator every 25 steps went unseen: states 24 draws apart had
    one number.
    """
    generator = torch.Generator().manual_seed(4242)
    found = set()
    for _ in range(1000):
        torch.rand((), generator=generator)
        found.add(hashed(generator.get_state()))
    assert len(found) == 1000
