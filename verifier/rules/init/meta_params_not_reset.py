from collections.abc import Iterator

from ...analysis.wording import count, some
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import CALL, NEW, SHARD, Event, Flow, covers
from ...source.looks import text
from ...source.looks_init import emptied
from ...source.registry import detector
from ...trace.events import ToEmpty
from ..base import Rule
from ._empty import NOT_FILLED, not_emptied


class MetaParamsNotReset(Rule):
    """Every parameter that `to_empty` allocates is written before the first forward.

    Why: an initialisation that visits `nn.Linear` and `nn.Embedding` misses a raw `nn.Parameter`; its values are then
    whatever lay in memory. The loss is NaN, or it falls with one tensor wrong.
    Wrong:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters()  # model.scale is a raw nn.Parameter: never written
        model.init_buffers()
    Right:
        with torch.device("meta"):
            model = Decoder()
        shard(model)
        model.to_empty(device="cpu")
        model.init_weights()  # walks over named_parameters(), so it writes model.scale too
        model.init_buffers()
    Fix: Initialise by walking over `named_parameters()`, so that none can be left out, or load a checkpoint that
    holds every one.
    Source: ByteDance-Seed/VeOmni#118; pytorch/torchtitan docs/fsdp.md; the probe fills what `to_empty` allocates with
    NaN and looks for it.
    """

    needs = frozenset({"train", "provoked"})
    wants = "models"

    def applies(self, evidence: Evidence) -> str:
        return not_emptied(evidence.trained)

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        if (filled := evidence.provoked) is None or not filled.models:
            return self.unknown(NOT_FILLED)
        bad = {name: sum(e.unset for e in entries) for name, entries in filled.parameters.items()}
        bad = {name: unset for name, unset in bad.items() if unset}
        if not bad:
            return self.passed(f"{count(len(run.parameters), 'parameter')} written after to_empty")
        return self.failed(
            f"{some(bad)}: allocated by to_empty and never written before the first forward",
            evidence.line_of(run, ToEmpty),
        )


_TOUCHES = (
    "modules",
    "named_modules",
    "buffers",
    "named_buffers",
    "parameters",
    "named_parameters",
    "load_state_dict",
    "children",
)


@detector("meta-params-not-reset")
def meta_params_not_reset(flow: Flow) -> Iterator[Hit]:
    for event, model in emptied(flow):
        runs = [f for f in flow.forwards(model) if covers(event, f)]
        if not runs:
            continue
        between = flow.events[event.index + 1 : runs[0].index]
        if not any(_may_write(e) for e in between) and not flow.escapes(model, event.index, runs[0].index):
            told = f"{text(event.node)} gives the parameters memory; nothing writes them before the forward in line {runs[0].line}"
            yield flow.hit("meta-params-not-reset", told, event)


def _may_write(event: Event) -> bool:
    """Whether an event may write a parameter; parameters that go straight into an optimizer do not count."""
    plain = event.method in ("parameters", "named_parameters") and not event.loops
    if event.method in _TOUCHES and not plain:
        return True
    named = event.op.startswith(("torch.nn.init.", "dsd.set", "dcp.load", "dist.", "tensor.")) or event.op in (
        NEW,
        CALL,
    )
    return (
        named and event.op not in (SHARD, "dist.get_rank", "dist.get_world_size", "dist.barrier")
    ) or event.method.endswith("_")
