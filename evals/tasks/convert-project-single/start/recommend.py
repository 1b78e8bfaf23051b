"""What to borrow next: python recommend.py CHECKPOINT CONFIG BOOK [BOOK ...]; one process, no training code."""

import sys

import torch
from shelves import config
from shelves.model import Recommender
from shelves.settings import Settings


def load(checkpoint: str, settings: Settings) -> Recommender:
    model = Recommender(settings)
    model.load_state_dict(torch.load(checkpoint, weights_only=True)["model"])
    return model.eval()


@torch.no_grad()
def recommend(model: Recommender, history: list[int], count: int = 5) -> list[tuple[int, float]]:
    """Books that are not in the history, the likeliest first, with their probabilities."""
    scores = model(torch.tensor([history]))[0, -1]
    scores[torch.tensor([0, *history])] = -torch.inf
    best = scores.softmax(dim=0).topk(count)
    return list(zip(best.indices.tolist(), best.values.tolist(), strict=True))


if __name__ == "__main__":
    if len(sys.argv) < 4:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[2])
    for book, probability in recommend(load(sys.argv[1], settings), [int(word) for word in sys.argv[3:]]):
        print(f"{book:>6}  {probability:.3f}")
