"""Puts the user's script into a folder.

python prepare.py FOLDER
"""

import shutil
import sys
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
shutil.copy(Path(__file__).with_name("train.py"), folder)
