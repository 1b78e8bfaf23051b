import ast
from collections.abc import Iterator

from ...source.flow_queries import emptied, inner, is_const, parts_of, text
from ...source.values import Value
from ..base import Flow, Hits, Run
from ._empty import EmptyRule


class MetaBuffersGarbage(EmptyRule):
    """Every buffer that `to_empty` allocates is initialised before the first forward.

    Why: `to_empty` allocates uninitialised memory. A non-persistent buffer (a RoPE table, a causal
    mask) is in no state dict and no `reset_parameters` rebuilds it, so the model runs on garbage:
    finite, wrong, different on every rank.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # parameters only: model.rope stays uninitialised
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        model.init_buffers()  # recompute what no state dict holds
    Fix: After `to_empty`, recompute every buffer in the function that initialises the parameters.
    Source: huggingface/accelerate PR#3921; hiyouga/LlamaFactory PR#10820; a separate run fills that
    memory with NaN.
    """

    kind = "buffer"

    def parts(self, run: Run) -> list[tuple[str, bool]]:
        return [
            (f"{b.name} {tuple(b.shape)}", bool(b.unset))
            for model in run.models
            for b in model.buffers
        ]

    def detect(self, flow: Flow) -> Hits:
        for event, model in emptied(flow):
            for holder in _modules_in(model):
                for made in flow.methods("register_buffer"):
                    name = made.args[0].const if made.on is holder and made.args else None
                    # Persistent buffers come with a state dict; only non-persistent ones must be
                    # computed again after to_empty (zoo/meta_init_rope.py).
                    lost = isinstance(name, str) and is_const(made.arg(2, "persistent"), False)
                    if lost and not _named_elsewhere(flow, str(name)):
                        buffer = (
                            f"{holder.name}.{name}, which is in no state dict and is not computed"
                            " again"
                        )
                        yield f"{text(event.node)} leaves uninitialised memory in {buffer}", event
                        return


def _modules_in(model: Value, depth: int = 0) -> Iterator[Value]:
    yield model
    # Bound of the walk through nested modules of known classes; six levels are more than models are
    # written with.
    for _, part in parts_of(model) if depth < 6 else ():
        of_calls = part.kind != "object" and part.event
        for one in [e for given in part.event.args for e in inner(given)] if of_calls else [part]:
            if one.kind == "object":
                yield from _modules_in(one, depth + 1)


def _named_elsewhere(flow: Flow, name: str) -> bool:
    """Whether a buffer's name, or all buffers, are named outside of constructors and forwards."""
    # A script that names the buffer, or all buffers, outside of constructors and forwards may
    # compute it again (zoo/meta_init_rope.py).
    words = {name, "buffers", "named_buffers", "_buffers", "__init__", "register_buffer"}
    for function in (node for module in flow.project.modules for node in ast.walk(module.tree)):
        if not isinstance(function, ast.FunctionDef | ast.Module):
            continue
        for node in (
            _own_nodes(function)
            if getattr(function, "name", "") not in ("__init__", "forward")
            else ()
        ):
            if isinstance(node, ast.Attribute):
                super_init = node.attr == "__init__" and isinstance(node.value, ast.Call)
                if node.attr in words and not super_init:
                    return True
            elif (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value in words
            ):
                return True
    return False


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of the functions inside it."""
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            queue.extend(ast.iter_child_nodes(node))
