"""Images to try the example with: `python draw.py FOLDER` draws discs, squares and triangles, a
folder for each class.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

SIDE, EACH = 40, 200


def shape(kind: str, chance: random.Random) -> Image.Image:
    """One shape of some colour and size, somewhere on a dark ground."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(chance.randrange(60) for _ in range(3)))
    half = chance.randint(6, 12)
    x, y = (chance.randint(half, SIDE - half) for _ in range(2))
    box, colour = (
        (x - half, y - half, x + half, y + half),
        tuple(chance.randrange(120, 256) for _ in range(3)),
    )
    draw = ImageDraw.Draw(image)
    if kind == "disc":
        draw.ellipse(box, fill=colour)
    elif kind == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - half), (x - half, y + half), (x + half, y + half)], fill=colour)
    return image


def main(folder: Path) -> None:
    chance = random.Random(0)
    for kind in ("disc", "square", "triangle"):
        (folder / kind).mkdir(parents=True)
        for number in range(EACH):
            shape(kind, chance).save(folder / kind / f"{number:02}.png")
    print(f"{3 * EACH} images in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "images"))
