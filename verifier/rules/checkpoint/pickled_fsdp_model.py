from ...source.flow_queries import inner, text
from ..base import Flow, Hits, RaisedRule

_WRITERS = ("pickle.dump", "pickle.dumps", "cloudpickle.dump", "cloudpickle.dumps")


class PickledFsdpModel(RaisedRule):
    """A sharded model is saved as a state dict, not pickled as an object.

    Why: `fully_shard` gives the module a class created at run time, which pickle cannot
    find by its name.
    Wrong:
        import io

        torch.save(model, io.BytesIO())  # raises PicklingError
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Fix: Save `get_model_state_dict(model)` with `dcp.save`, or with `full_state_dict=True` and
    `torch.save` on rank 0.
    Source: the message of torch 2.13.0; `torch.distributed.checkpoint.state_dict`.
    """

    pattern = r"Can't pickle <class 'torch\.distributed\.fsdp\._fully_shard\._fsdp_init\.FSDP"

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops("torch.save", *_WRITERS):
            given = inner(event.args[0]) if event.args else ()
            if any(
                value.kind == "object" and flow.sharded_by(value, event) is not None
                for value in given
            ):
                yield f"{text(event.node)} pickles the sharded model itself", event
