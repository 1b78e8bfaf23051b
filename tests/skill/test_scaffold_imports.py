"""Imports at the top of a generated module: those that its code uses, in the order of the template."""

import textwrap

from verified_fsdp2.skill.scaffold.imports import used_imports


def kept(code: str) -> list[str]:
    lines = used_imports(textwrap.dedent(code).lstrip()).splitlines()
    return [line for line in lines if "import" in line]


def test_what_is_used_stays() -> None:
    code = """
        import os
        import json
        import torch.nn.functional as F
        from pathlib import Path
        from typing import Any, NamedTuple

        class Point(NamedTuple):
            x: "json"

        def read(path: Path):
            import zlib
            return F.pad(path, os.sep)
    """
    assert kept(code) == [
        "import os",
        "import torch.nn.functional as F",
        "from pathlib import Path",
        "from typing import NamedTuple",
        "    import zlib",
    ]


def test_an_empty_group_leaves_no_gap() -> None:
    code = '"""Words."""\n\nimport json\nfrom os import (\n    path,\n)\n\nimport torch\n\nx = torch\n'
    assert used_imports(code) == '"""Words."""\n\nimport torch\n\nx = torch\n'


def test_a_word_in_a_text_is_no_use() -> None:
    assert kept('import json\nimport os\n\nx = f"json {os}"  # json\n') == ["import os"]
