"""Train the recommender: python train.py configs/town.yaml out=runs/town [key=value ...]"""

import sys

from shelves import config, observers
from shelves.loop import Run, training
from shelves.settings import Settings


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    run = Run(settings)
    if settings.resume:
        run.load(settings.resume)
    watching = [observers.Console(), observers.Files(run), observers.Alarm(), observers.Saves(run)]
    for event in training(run):
        for observer in watching:
            observer.see(event)


if __name__ == "__main__":
    main()
