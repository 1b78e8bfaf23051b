"""Sketches of bits: they add up over shards exactly, and any one changed bit shows."""

import pytest
import torch

from verified_fsdp2.verifier.probe import bit_sketch as bits
from verified_fsdp2.verifier.probe.compat import tensors

MASK = 2**64 - 1
DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64),
)


def value(tensor: torch.Tensor) -> int:
    found = bits.sketch(tensor)
    assert found is not None
    return bits.unsigned(int(found))


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_shards_add_up(monkeypatch: pytest.MonkeyPatch, dim: int, parts: int) -> None:
    whole = torch.randn(5, 12, 9)
    expected, total, at = value(whole), 0, 0
    for shard in whole.chunk(parts, dim):
        offset = tuple(at if one == dim else 0 for one in range(3))
        box = (tuple(whole.shape), tuple(shard.shape), offset)
        monkeypatch.setattr(tensors, "box", lambda tensor, box=box: box)
        total += value(shard)
        at += shard.shape[dim]
    assert total & MASK == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_flipped_bit_shows(dtype: torch.dtype) -> None:
    tensor = torch.randn(40, 30).abs().mul(100).to(dtype)
    before = value(tensor)
    raw = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(torch.uint8)
    for position in range(0, raw.numel(), 97):
        for bit in (1,) if dtype == torch.bool else (1, 16, 128):
            raw.view(-1)[position] ^= bit
            assert value(tensor) != before
            raw.view(-1)[position] ^= bit
    assert value(tensor) == before


def test_order_and_place_count() -> None:
    tensor = torch.randn(64, 64)
    assert len({value(tensor), value(tensor.T.contiguous()), value(tensor.flip(0))}) == 3
    swapped = tensor.clone()
    swapped[3, 4], swapped[50, 60] = tensor[50, 60], tensor[3, 4]
    assert value(swapped) != value(tensor)


def test_a_device_that_a_tensor_only_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with CUDA on the CPU: what the sketch makes lies where the memory is."""
    tensor = torch.randn(5, 7)
    before = value(tensor)
    monkeypatch.setattr(bits, "_kept", {})
    monkeypatch.setattr(torch.Tensor, "device", property(lambda tensor: torch.device("cuda")))
    assert value(tensor) == before


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(300, 700)
    before = value(tensor)
    monkeypatch.setitem(bits._BLOCK, "cpu", 1000)
    assert value(tensor) == before


def test_what_has_no_order_is_left_out() -> None:
    assert bits.sketch(torch.eye(3).to_sparse()) is None
    assert bits.sketch(torch.empty(2, device="meta")) is None
    assert value(torch.empty(0, 3)) == 0
