from ...source.flow_queries import FULL, LOW_DTYPES, POLICY, is_dtype, is_known, made_by
from ...source.values import Value, root_of
from ...trace.events import Place
from ..base import Flow, Hits, RaisedRule, RootCause, Run
from ..raised import DTYPES, inner_output
from ._low import low_groups


class OutputDtypeOnInnerBlocks(RaisedRule):
    """`output_dtype` is set on the root, not on its blocks.

    Why: it casts a module's output. That of a block is then float32, and the root's parameters are
    bfloat16.
    Wrong:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        model.norm = nn.LayerNorm(8)
        model.forward = lambda tokens: model.norm(
            model.blocks[1](model.blocks[0](model.embedding(tokens)))
        )
        shard(model, mp_policy=policy)
        model(batch)  # raises RuntimeError
    Right:
        for block in model.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        fully_shard(model, mp_policy=policy)
        model(batch)
    Fix: Shard the blocks with a policy without `output_dtype`, and the root with one that has it.
    Source: goodfire-ai/spd PR#491.
    """

    pattern = DTYPES

    def absent(self, train: Run) -> str:
        given = any(record.output_dtype for record in low_groups(train))
        return "" if given else "no group that computes in low precision has an output_dtype"

    def fits(self, run: Run, cause: RootCause) -> bool:
        return inner_output(run) is not None

    def place(self, run: Run, cause: RootCause) -> Place | None:
        inner = inner_output(run)
        return inner.at_line if inner is not None else cause.location

    def detect(self, flow: Flow) -> Hits:
        for event, module in flow.shards:
            policy, root = made_by(event.kwargs.get("mp_policy"), POLICY), root_of(module)
            if policy is None or not event.loops or root is module:
                continue
            outer = flow.first_shard.get(id(root))
            whole = made_by(outer.kwargs.get("mp_policy"), POLICY) if outer is not None else None
            low = whole is not None and is_dtype(whole.arg(0, "param_dtype"), LOW_DTYPES)
            low = low and is_dtype(policy.arg(0, "param_dtype"), LOW_DTYPES)
            if (
                low
                and is_dtype(policy.arg(2, "output_dtype"), FULL)
                and is_known(flow, root)
                and not _casts_inside(root)
            ):
                yield (
                    (
                        "the blocks return float32 to modules of the root, whose parameters are"
                        " cast to 16 bits"
                    ),
                    policy,
                )
                return


def _casts_inside(root: Value) -> bool:
    """Whether the model's own forward casts."""
    forward = root.cls.methods.get("forward")
    lines = (
        root.cls.home.lines[forward.lineno - 1 : forward.end_lineno]
        if forward is not None
        else [".to("]
    )
    # A forward that casts by itself may bring the blocks' float32 back to 16 bits.
    return any(word in line for line in lines for word in (".to(", ".type", "autocast", "bfloat16"))
