from collections.abc import Iterator

from ...analysis.presence import never_sharded, trainings, unnamed, unseen_load, went_through
from ...evidence import LOADS, Evidence
from ...finding import Hit
from ...source.events import Flow
from ...source.looks import is_known, shared, text
from ...source.registry import detector
from ...source.values import Value, reach
from ...trace.events import Checkpoint
from ..raised import MixedRule


class FullSdIntoDtensor(MixedRule):
    """Whole tensors are loaded into a sharded model or optimizer by the distributed state-dict functions.

    Why: after `fully_shard` the weights are DTensors; `model.load_state_dict`, `param.copy_` and
    `optimizer.load_state_dict` take whole tensors as they are and do not cut them.
    Wrong:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        model.load_state_dict(whole)  # raises RuntimeError
    Right:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    Fix: Use `set_model_state_dict` or `set_optimizer_state_dict` with `options=StateDictOptions(full_state_dict=True)`
    (and `broadcast_from_rank0=True` if only rank 0 has the tensors), or load before sharding.
    Source: pytorch#136336; pytorch PR#124651.
    """

    skipped_with = ("checkpoint",)

    def applies(self, evidence: Evidence) -> str:
        if not went_through(evidence) or not unnamed(evidence.sources, *LOADERS) or not _loads_nothing(evidence):
            return ""
        return "the script loads no state dict and copies into no parameter"

    def unseen(self, evidence: Evidence) -> str:
        return never_sharded(evidence) or unseen_load(evidence, *(name for name in LOADERS if name != "copy_"))


LOADERS = ("load_state_dict", "set_model_state_dict", "set_state_dict", "set_optimizer_state_dict", "copy_")


def _loads_nothing(evidence: Evidence) -> bool:
    """Whether no run has loaded a state, in the script or in a library."""
    traces = [trace for run in trainings(evidence) for trace in run.traces]
    return not any(r.op in LOADS for trace in traces for r in trace.of(Checkpoint))


@detector("full-sd-into-dtensor")
def full_into_dtensor(flow: Flow) -> Iterator[Hit]:
    for event in flow.methods("load_state_dict"):
        model, state = event.on, event.arg(0, "state_dict")
        if model is None or state is None or flow.sharded_by(model, event) is None or _saved_sharded(flow):
            continue
        if event.open or "assign" in event.kwargs:
            continue
        read = [p for p in reach(state) if p.kind == "made" and p.name in ("torch.load", "safetensors.torch.load_file")]
        read += [p for p in reach(state) if _of_plain_model(flow, p)]
        split = any(p.name in ("tensor.distribute_tensor", "dsd.get_model_state_dict") for p in reach(state))
        if read and not any(p.rank for p in reach(state)) and not split:
            told = f"{text(event.node)} puts whole tensors into parameters that are shards"
            yield flow.hit("full-sd-into-dtensor", told, event)


def _of_plain_model(flow: Flow, part: Value) -> bool:
    """Whether a value is the state dict of a known model that nobody shards."""
    model = part.event.on if part.kind == "made" and part.name == "state_dict" and part.event is not None else None
    return model is not None and is_known(flow, model) and id(model) not in flow.roots


def _saved_sharded(flow: Flow) -> bool:
    """Whether the project itself saves state dicts that were not gathered."""
    for event in flow.ops("torch.save"):
        raw = [p for a in event.args[:1] for p in reach(a) if p.kind == "made" and p.name == "state_dict"]
        if raw and not shared(event.args[0]):
            return True
    return False
