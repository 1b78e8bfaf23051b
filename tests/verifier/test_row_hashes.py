"""Rows of a batch are hashed however many tensors the model takes."""

import torch

from verified_fsdp2.verifier.probe.sketch import row_hashes


def test_a_model_may_take_many_tensors() -> None:
    ids = torch.arange(12).reshape(3, 4)
    mask = ids > 4
    batch = [ids, ids + 1, mask, ids.float(), ids * 2, mask]
    hashes = row_hashes(batch)
    assert len(set(hashes)) == 3
    assert row_hashes([part[1:] for part in batch]) == hashes[1:]
    assert row_hashes([*batch[:2], ~mask, *batch[3:]]) != hashes
