"""What the web site's team relies on."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from recommend import load, recommend
from shelves.model import Recommender
from shelves.settings import Settings


def saved(folder):
    torch.manual_seed(0)
    model = Recommender(Settings())
    torch.save({"model": model.state_dict(), "step": 0}, folder / "step_0.pt")
    return model


def test_a_checkpoint_is_loaded_without_training_code(tmp_path):
    model = saved(tmp_path)
    again = load(str(tmp_path / "step_0.pt"), Settings())
    loans = torch.tensor([[3, 1, 4, 1, 5]])
    assert torch.equal(again(loans), model.eval()(loans))
    assert again.offers.weight is again.books.weight


def test_books_of_the_history_are_not_offered(tmp_path):
    saved(tmp_path)
    offers = recommend(load(str(tmp_path / "step_0.pt"), Settings()), [3, 1, 4], count=10)
    books, probabilities = zip(*offers, strict=True)
    assert not {0, 3, 1, 4} & set(books)
    assert list(probabilities) == sorted(probabilities, reverse=True)
