"""A token file of long documents, read through a memory map."""

import os
import tempfile

import numpy as np
import torch
import torch.distributed as dist

VOCAB = 48


def write_tokens(path, n=40_000):
    rng = np.random.default_rng(12)
    successor = rng.permutation(VOCAB)
    out = np.empty(n, dtype=np.uint16)
    state = 0
    jump, where = rng.random(n) < 0.07, rng.integers(0, VOCAB, n)
    for i in range(n):
        out[i] = state
        state = where[i] if jump[i] else successor[state]
    out.tofile(path)


def open_tokens():
    """rank 0 writes the file once, everybody maps it"""
    path = [None]
    if dist.get_rank() == 0:
        path[0] = os.path.join(tempfile.mkdtemp(), "tokens.bin")
        write_tokens(path[0])
    dist.broadcast_object_list(path)
    return np.memmap(path[0], dtype=np.uint16, mode="r")


def window(tokens, position, length):
    position = position % (len(tokens) - length - 1)
    return torch.from_numpy(tokens[position : position + length + 1].astype(np.int64))
