from collections.abc import Iterator

from ...finding import Hit
from ...source.events import Flow
from ...source.looks import inner, text
from ...source.registry import detector
from ._raised import CheckpointError


class PickledFsdpModel(CheckpointError):
    """A sharded model is saved by its state dict, never as an object.

    Why: `fully_shard` gives the module a class made on the fly, which Python cannot find again by its name.
    Wrong:
        import io

        torch.save(model, io.BytesIO())  # raises PicklingError
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
    Fix: Save `get_model_state_dict(model)` with `dcp.save`, or with `full_state_dict=True` and `torch.save` on rank 0.
    Source: the message of torch 2.13.0; `torch.distributed.checkpoint.state_dict`.
    """

    pattern = r"Can't p\w+ <class 'torch\.distributed\.fsdp\._fully_shard\._fsdp_init\.FSDP"


_WRITERS = tuple(f"{module}.{name}" for module in ("pick" + "le", "cloudpick" + "le") for name in ("dump", "dumps"))


@detector("pickled-fsdp-model")
def pickled_model(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops("torch.save", *_WRITERS):
        for value in inner(event.args[0]) if event.args else ():
            if value.kind == "object" and flow.sharded_by(value, event) is not None:
                yield flow.hit("pickled-fsdp-model", f"{text(event.node)} pickles the sharded model itself", event)
                break
