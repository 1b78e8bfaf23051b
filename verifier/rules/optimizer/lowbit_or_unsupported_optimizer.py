import re

from ...source.flow_queries import text
from ...trace.events import Optimizer, Place
from ..base import Flow, Hits, RaisedRule, RootCause, Run
from ..policies import NeedsSharding
from ..raised import MESHES, MIXED, NO_STRATEGY, culprit, stack


class UnsupportedOptimizer(RaisedRule):
    """The optimizer supports DTensor parameters.

    Why: an optimizer that reduces over a parameter (row and column means, norms) gets Partial
    DTensors, on which some in-place operations are undefined. `torch.optim.Adafactor` raises, and
    so does one that keeps its state in plain tensors (that of transformers); 8-bit optimizers with
    custom kernels read shards as if they were whole.
    Wrong:
        optimizer = torch.optim.Adafactor(model.parameters())
        optimizer.step()  # raises RuntimeError
    Right:
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.step()
    Fix: Use AdamW, SGD or another element-wise optimizer, or a low-bit one that is made for FSDP2
    (torchao).
    Source: bitsandbytes-foundation/bitsandbytes#1633; pytorch/ao#4912;
    axolotl-ai-cloud/axolotl#2744.
    """

    pattern = rf"{NO_STRATEGY}|{MIXED}"
    policies = (NeedsSharding(),)

    def fits(self, run: Run, cause: RootCause) -> bool:
        if re.search(MIXED, cause.error):
            return culprit(run, cause)[0] == self.name
        return (
            any(f.optimizer is not None for f in stack(run, cause))
            # The same texts name two meshes where tensor parallelism meets FSDP: clip-mixed-mesh
            # and tensors-on-two-meshes own them (zoo/tp_fsdp.py (two meshes)).
            and re.search(MESHES, cause.error) is None
        )

    def place(self, run: Run, cause: RootCause) -> Place | None:
        return run.line_of(Optimizer, last=True) or cause.location

    def detect(self, flow: Flow) -> Hits:
        for event, models in flow.optimizers:
            sharded = any(flow.sharded_by(model, event) is not None for model in models)
            # torch's Adafactor factors row and column means of whole matrices, for which DTensor
            # has no strategy (torch 2.13.0) (fault lowbit_or_unsupported_optimizer.yaml).
            if sharded and event.op == "torch.optim.Adafactor":
                yield f"{text(event.node)} cannot update sharded matrices", event
