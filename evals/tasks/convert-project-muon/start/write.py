"""Let the model write: python write.py WEIGHTS CONFIG [WORD ...]; one process."""

import sys

import torch
from quill import config
from quill.model import Writer
from quill.settings import Settings
from quill.text import BEGIN, END


@torch.no_grad()
def write(model: Writer, begin: list[int], longest: int) -> list[int]:
    """The likeliest next word, until the end of the document."""
    words = [BEGIN, *begin]
    while len(words) < longest and words[-1] != END:
        words.append(int(model(torch.tensor([words]))[0, -1].argmax()))
    return words


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[2])
    model = Writer(settings)
    model.load_state_dict(torch.load(sys.argv[1], weights_only=True))
    print(*write(model.eval(), [int(word) for word in sys.argv[3:]], settings.text.length))
