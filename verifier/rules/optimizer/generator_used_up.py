from ...source.used_up import UsedUp, used_up
from ...trace.events import Place
from ..base import Flow, Hits, SourceRule


class GeneratorUsedUp(SourceRule):
    """What is gone through twice is no generator.

    Why: `model.parameters()` is a generator: what goes through it a second time finds nothing. A
    clip that first computes the norm and then scales leaves every gradient as it was, and returns
    the norm; parameters that were given to an optimizer are no longer there for the clip. Nothing
    is raised, and every number of ranks agrees.
    Wrong:
        params = model.parameters()
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        torch.nn.utils.clip_grad_norm_(params, 1.0)  # of no parameter
    Right:
        params = list(model.parameters())
        optimizer = torch.optim.AdamW(params, lr=1e-3)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
    Fix: Make it a list where it is made: `list(model.parameters())`.
    Source: inclusionAI/AReaL (6b78aad274, a clip that is given `model.parameters()`);
    docs.python.org/3/glossary.html#term-generator-iterator.
    """

    def detect(self, flow: Flow) -> Hits:
        trees = {str(one.path): one.tree for one in flow.project.modules if not one.installed}
        for found in used_up(trees):
            line = found.made.lineno
            yield (
                _said(found),
                Place(file=found.file, line=line, function=found.within, code=""),
            )


def _said(found: UsedUp) -> str:
    lines = [getattr(one, "lineno", 0) for one in (found.first, found.second)]
    where = f" of {found.function}" if found.function else ""
    if found.first is found.second:
        each = f"a loop goes through it in each turn (line {lines[0]})"
        return f"`{found.name}` is a generator, and {each}"
    return (
        f"a generator is gone through at line {lines[0]} and again at line {lines[1]}, where"
        f" nothing is left of it (`{found.name}`{where})"
    )
