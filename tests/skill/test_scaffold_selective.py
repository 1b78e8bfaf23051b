"""Selective activation checkpointing: which results a block keeps, counted as backward computes the
others again.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from model_project import built, imported, write
from records import cases
from trees import DECODER

TOKENS = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))
PRODUCTS = 7  # of a block: query, key, value, output, gate, up, down


class Counted(TorchDispatchMode):
    """How often each operation is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(func)] += 1
        return func(*args, **(kwargs or {}))


def backward(folder: Path, *settings: str) -> tuple[Counter[str], list[torch.Tensor]]:
    with imported(write(folder, DECODER, *settings)) as modules:
        model = built(modules)
        loss = model(TOKENS).float().logsumexp(-1).sum()
        with Counted() as counted:
            loss.backward()
        return counted.calls, [param.grad.full_tensor() for param in model.parameters()]


@pytest.mark.usefixtures("alone")
@cases(
    "kind, products, attention",
    ("op-selective", PRODUCTS // 2, 0),
    ("full", PRODUCTS - 1, 1),  # nothing needs the result of the last product
)
def test_backward_computes_every_second_product_again(
    tmp_path: Path, kind: str, products: int, attention: int
) -> None:
    blocks = DECODER["layers"]
    plain, wanted = backward(tmp_path / "plain", "precision.param_dtype=float32")
    setting = f"memory.activation_checkpointing={kind}"
    found, grads = backward(tmp_path / kind, "precision.param_dtype=float32", setting)
    more = found - plain
    assert more["aten.mm.default"] == blocks * products
    kernels = [number for name, number in more.items() if "attention" in name]
    assert sum(kernels) == blocks * attention
    assert all(torch.equal(*pair) for pair in zip(grads, wanted, strict=True))


@pytest.mark.usefixtures("alone")
def test_products_with_a_bias_count_too(tmp_path: Path) -> None:
    with imported(
        write(tmp_path, DECODER, "memory.activation_checkpointing=op-selective")
    ) as modules:
        layers = [torch.nn.Linear(4, 4, bias=number % 2 == 0) for number in range(4)]
        block = torch.nn.Sequential(
            *(step for layer in layers for step in (layer, torch.nn.Tanh()))
        )
        modules["model"].checkpoint_activations([block])
        loss = block(torch.ones(2, 4, requires_grad=True)).sum()
        with Counted() as counted:
            loss.backward()
    # Of addmm, mm, addmm, mm, the first and the third are kept; backward itself has two of mm for
    # each.
    assert counted.calls["aten.addmm.default"] == 0
    assert counted.calls["aten.mm.default"] == 2 * 4 + 2
