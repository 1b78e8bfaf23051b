import ast
from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Flow
from ...source.looks import inner, is_const, parts_of, text
from ...source.looks_init import emptied
from ...source.registry import detector
from ...source.values import Value
from ...trace.events import ToEmpty
from ..base import Rule
from ._empty import NOT_FILLED, not_emptied


class MetaBuffersGarbage(Rule):
    """Every buffer that `to_empty` allocates is written before the first forward.

    Why: `to_empty` gives buffers memory with whatever lay there. A non-persistent buffer (a RoPE table, a causal
    mask) is in no state dict and no `reset_parameters` rebuilds it, so the model runs on garbage: finite, wrong, and
    different on every rank.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # parameters only: model.rope is whatever lay in memory
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()
        model.init_buffers()  # recompute what no state dict holds
    Fix: After `to_empty`, recompute every buffer in the function that initialises the parameters.
    Source: huggingface/accelerate PR#3921; hiyouga/LlamaFactory PR#10820; a run of its own (provoked) fills what
    `to_empty` allocates with NaN and looks for it at the first forward.
    """

    needs = frozenset({"train", "provoked"})
    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        if reason := not_emptied(evidence.trained):
            return reason
        return "" if any(m.buffers for m in evidence.trained.models) else "the model has no buffer"

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if (filled := evidence.provoked) is None or not filled.models:
            return self.unknown(NOT_FILLED)
        bad = [b for m in filled.models for b in m.buffers if b.unset]
        if not bad:
            return self.passed(f"{count(sum(len(m.buffers) for m in run.models), 'buffer')} written after to_empty")
        names = some(f"{b.name} {tuple(b.shape)}" for b in bad)
        return self.failed(
            f"{names}: allocated by to_empty and never written before the first forward",
            evidence.line_of(run, ToEmpty),
        )


@detector("meta-buffers-garbage")
def meta_buffers_garbage(flow: Flow) -> Iterator[Hit]:
    for event, model in emptied(flow):
        for holder in _modules_in(model):
            for made in flow.methods("register_buffer"):
                if made.on is not holder or not made.args or not isinstance(made.args[0].const, str):
                    continue
                name, persistent = made.args[0].const, made.arg(2, "persistent")
                if is_const(persistent, False) and persistent is not None and not _named_elsewhere(flow, name):
                    told = f"{text(event.node)} gives {holder.name}.{name} memory; no state dict holds it and nothing computes it again"
                    yield flow.hit("meta-buffers-garbage", told, event)
                    return


def _modules_in(model: Value, depth: int = 0) -> Iterator[Value]:
    yield model
    if depth < 6:
        for _, part in parts_of(model):
            elements = (
                [part]
                if part.kind == "object"
                else [e for g in part.event.args for e in inner(g)]
                if part.event
                else []
            )
            for one in elements:
                if one.kind == "object":
                    yield from _modules_in(one, depth + 1)


def _named_elsewhere(flow: Flow, name: str) -> bool:
    """Whether a buffer's name, or all buffers, are spoken of outside of constructors and forwards."""
    words = {name, "buffers", "named_buffers", "_buffers", "__init__", "register_buffer"}
    for module in flow.project.modules:
        for function in ast.walk(module.tree):
            if isinstance(function, ast.FunctionDef | ast.Module) and getattr(function, "name", "") not in (
                "__init__",
                "forward",
            ):
                for node in _own_nodes(function):
                    said = (
                        node.attr
                        if isinstance(node, ast.Attribute)
                        else node.value
                        if isinstance(node, ast.Constant)
                        else ""
                    )
                    if isinstance(said, str) and said in words and not _is_super_init(node):
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


def _is_super_init(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "__init__" and isinstance(node.value, ast.Call)
