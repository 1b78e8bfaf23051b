"""The functions that accelerate's Megatron engine gives to Megatron for each chunk of a model.

No GPU, no Megatron.

python reproduce.py CHECKOUT_OF_ACCELERATE
"""

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

path = Path(sys.argv[1], "src/accelerate/utils/megatron_lm.py")
(made,) = (
    node
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    if isinstance(node, ast.ListComp) and "finish_param_sync" in ast.unparse(node)
)
print(f"line {made.lineno}: {ast.unparse(made)}")

synced = []
optimizer = SimpleNamespace(finish_param_sync=lambda index, x: synced.append(index))
engine = SimpleNamespace(module=["chunk 0", "chunk 1", "chunk 2"], optimizer=optimizer)
functions = eval(compile(ast.Expression(made), str(path), "eval"), {"self": engine})
for function in functions:
    function(None)
print("model_index that each function passes on:", synced)
