from ...trace.events import Raised
from ..base import Evidence, Finding, RaisedRule, RootCause, Run
from ..raised import DTYPES, inner_output, stack
from ._low import low_groups


class BuffersAndOddInputsNotCast(RaisedRule):
    """Under a mixed-precision policy the model itself casts buffers and tensors that are no forward
    arguments.

    Why: `param_dtype` casts parameters and the floating-point tensors among the arguments of a
    forward. A buffer, a tensor created in forward, or one inside a custom object stays float32 and
    is combined with bfloat16 weights.
    Wrong:
        mix = torch.eye(8)  # a buffer
        forward = model.embedding.forward
        model.embedding.forward = lambda tokens: forward(tokens) @ mix
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(batch)  # raises RuntimeError
    Right:
        mix = torch.eye(8)
        forward = model.embedding.forward
        model.embedding.forward = lambda tokens: (x := forward(tokens)) @ mix.to(x.dtype)
        shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model(batch)
    Fix: Cast the tensor where it is used: `.to(x.dtype)`.
    Source: pytorch#146114; pytorch#153077; pytorch#143900; pytorch#159359; goodfire-ai/spd PR#491.
    On 2.7.1 also tensors in a dataclass are left as they are, and the arguments of a sharded module
    that a checkpoint recomputes.
    Torch: run on 2.13.0 and 2.7.1.
    """

    pattern = DTYPES

    def absent(self, train: Run) -> str:
        return "" if low_groups(train) else "no group computes in low precision"

    def fits(self, run: Run, cause: RootCause) -> bool:
        frames = stack(run, cause)  # none where the error cannot be placed
        in_forward = not frames or any(f.module is not None for f in frames)
        return bool(low_groups(run)) and inner_output(run) is None and in_forward

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        run = evidence.train
        if found.status != "fail" or run is None or run.completed:
            return found
        seen = [
            f
            for t in run.traces
            if (r := t.first(Raised))
            for f in r.frames
            if f.own and f.module is not None
        ]
        kinds = (
            {**seen[0].tensors, **{f"self.{n}": dtype for n, dtype in seen[0].buffers.items()}}
            if seen
            else {}
        )
        dtypes = ", ".join(f"{name} is {dtype}" for name, dtype in kinds.items())
        return self.failed(f"{found.evidence}; there {dtypes}", found.location) if dtypes else found
