"""torchrun --nproc-per-node 4 train.py configs/draft.yaml out=runs/draft [key=value ...]"""

import sys

from quill import comm, config
from quill.press import Press
from quill.settings import Settings


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    comm.start()
    press = Press(settings)
    if settings.resume:
        press.load(settings.resume)
    press.run()
    comm.stop()


if __name__ == "__main__":
    main()
