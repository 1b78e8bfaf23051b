"""python -m pytest tests"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shelves.lamb import Lamb, length
from shelves.readers import Order
from shelves.settings import LambSettings


def stepped(weight, grad, **settings):
    parameter = torch.nn.Parameter(torch.tensor(weight))
    parameter.grad = torch.tensor(grad)
    optimizer = Lamb([parameter], LambSettings(**settings))
    optimizer.step()
    return parameter.detach(), optimizer.ratios[0]


def test_length():
    assert length(torch.tensor([3.0, 4.0])) == 5.0


def test_the_ratio_is_the_norm_of_the_weight_by_that_of_the_update():
    # the first update of Adam is the sign of the gradient
    changed, ratio = stepped([[3.0, 4.0]], [[0.1, -0.2]], lr=0.1, weight_decay=0.0)
    assert math.isclose(ratio, 5.0 / math.sqrt(2), rel_tol=1e-4)
    assert torch.allclose(changed, torch.tensor([[3.0 - 0.1 * ratio, 4.0 + 0.1 * ratio]]), atol=1e-4)


def test_a_weight_of_zero_moves_as_in_adam():
    changed, ratio = stepped([[0.0, 0.0]], [[0.1, -0.2]], lr=0.1, weight_decay=0.0)
    assert ratio == 1.0
    assert torch.allclose(changed, torch.tensor([[-0.1, 0.1]]), atol=1e-4)


def test_ratios_have_bounds():
    assert stepped([[300.0, 400.0]], [[0.1, -0.2]], most_ratio=10.0, weight_decay=0.0)[1] == 10.0


def test_an_order_goes_on_where_it_was():
    order = Order(10, 4, seed=1)
    first = [order.take().tolist() for _ in range(5)]
    assert sorted(first[0] + first[1])[:2] != [0, 0] and len(set(first[0]) | set(first[1])) == 8
    again = Order(10, 4, seed=1)
    again.load_state_dict({"number": 3})
    assert again.take().tolist() == first[3]


def test_vectors_do_not_adapt():
    from shelves.lamb import make
    from shelves.model import Recommender
    from shelves.settings import Settings

    optimizer = make(Recommender(Settings()), LambSettings())
    adapting, rest = optimizer.param_groups
    assert all(p.ndim == 2 for p in adapting["params"])
    assert all(p.ndim == 1 for p in rest["params"]) and not rest["adapt"]
