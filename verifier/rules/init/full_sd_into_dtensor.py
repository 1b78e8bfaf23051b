from ...analysis.applicability import never_sharded, trainings, unnamed, unseen_load, went_through
from ...evidence import LOADS, Evidence
from ...source.flow_queries import is_known, shared, text
from ...source.values import Value, reach
from ...trace.events import Checkpoint
from ..base import Flow, Hits
from ..policies import SkippedWith
from ..raised import MixedRule

# Calls that put a state dict, or one tensor, into parameters: without any of them in the sources
# the rule does not apply (faults full_sd_into_dtensor*.yaml).
LOADERS = (
    "load_state_dict",
    "set_model_state_dict",
    "set_state_dict",
    "set_optimizer_state_dict",
    "copy_",
)


class FullSdIntoDtensor(MixedRule):
    """Full tensors are loaded into a sharded model or optimizer by the distributed state-dict
    functions.

    Why: after `fully_shard` the weights are DTensors; `model.load_state_dict`, `param.copy_` and
    `optimizer.load_state_dict` take full tensors as they are and do not shard them.
    Wrong:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        model.load_state_dict(whole)  # raises RuntimeError
    Right:
        whole = {name: value.clone() for name, value in model.state_dict().items()}
        shard(model)
        set_model_state_dict(model, whole, options=StateDictOptions(full_state_dict=True))
    Fix: Use `set_model_state_dict` or `set_optimizer_state_dict` with
    `options=StateDictOptions(full_state_dict=True)` (and `broadcast_from_rank0=True` if only rank 0
    has the tensors), or load before sharding.
    Source: pytorch#136336; pytorch PR#124651.
    """

    policies = (SkippedWith("checkpoint"),)

    def applies(self, evidence: Evidence) -> str:
        if not went_through(evidence) or not unnamed(evidence.sources, *LOADERS):
            return ""
        records = (r for run in trainings(evidence) for r in run.all(Checkpoint))
        # A library may load where the sources name no call of torch's (library loops (transformers,
        # Lightning)).
        loads = any(record.op in LOADS for record in records)  # in the script or in a library
        return "" if loads else "the script loads no state dict and copies into no parameter"

    def unseen(self, evidence: Evidence) -> str:
        return never_sharded(evidence) or unseen_load(evidence, *LOADERS[:-1])

    def detect(self, flow: Flow) -> Hits:
        if _saves_shards(flow):
            return
        for event in flow.methods("load_state_dict"):
            model, state = event.on, event.arg(0, "state_dict")
            if model is None or state is None or flow.sharded_by(model, event) is None:
                continue
            parts = list(reach(state))
            sharded = any(
                p.rank
                # A file of this rank's own, chosen among a folder's, holds this rank's shards
                # (linted right scripts of the exam: a file name with the rank in it).
                or p.local
                or p.name in ("tensor.distribute_tensor", "dsd.get_model_state_dict")
                for p in parts
            )
            if (
                not event.open
                # With assign=True the load replaces parameters instead of copying:
                # parameter-replaced-after-shard judges it.
                and "assign" not in event.kwargs
                and not sharded
                and any(_full(flow, p) for p in parts)
            ):
                yield f"{text(event.node)} loads full tensors into sharded parameters", event


def _full(flow: Flow, part: Value) -> bool:
    """Whether a value is a state dict from a file, or of a known model that is not sharded."""
    if part.kind == "made" and part.name in ("torch.load", "safetensors.torch.load_file"):
        return True
    model = (
        part.event.on
        if part.kind == "made" and part.name == "state_dict" and part.event is not None
        else None
    )
    return model is not None and is_known(flow, model) and id(model) not in flow.roots


def _saves_shards(flow: Flow) -> bool:
    """Whether the project itself saves state dicts that were not gathered."""
    saved = [event.args[0] for event in flow.ops("torch.save") if event.args]
    raw = (
        value
        for value in saved
        if any(p.kind == "made" and p.name == "state_dict" for p in reach(value))
    )
    return not all(map(shared, raw))
