"""torchrun --nproc-per-node 4 train.py configs/tags.yaml out=runs/tags [key=value ...]"""

import sys

from tagger import comm, config
from tagger.engine import Engine
from tagger.settings import Settings


def main() -> None:
    path, *words = sys.argv[1:] or [""]
    if not path:
        raise SystemExit(__doc__)
    settings = config.read(Settings, path, words)
    comm.start()
    engine = Engine(settings)
    if settings.resume:
        engine.load(settings.resume)
    engine.run()
    comm.stop()


if __name__ == "__main__":
    main()
