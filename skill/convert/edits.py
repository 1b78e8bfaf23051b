"""The edits of one script: each construct is replaced where it stands, or marked."""

from __future__ import annotations

from collections.abc import Sequence

import libcst as cst

from . import states
from .blocks import Statement, joined, negated, plain_body, split_test
from .expressions import ExpressionEdits
from .found import Construct, Todo
from .nodes import switch, text_of


class Edits(ExpressionEdits):
    """Applies what has one right answer, to statements and the expressions in them."""

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._functions.append(self.place(node).start.line)

    def leave_FunctionDef(
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> Statement:
        self._functions.pop()
        return self._marked(original_node, updated_node, header=True)

    def leave_ClassDef(self, original_node: cst.ClassDef, updated_node: cst.ClassDef) -> Statement:
        return self._marked(original_node, updated_node, header=True)

    def visit_If(self, node: cst.If) -> None:
        self._ifs.append((node, {}))

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Statement:
        _, gathered = self._ifs.pop()
        made = self._marked(original_node, updated_node, header=True)
        if not gathered or not isinstance(made, cst.If):
            return made
        whole = next(name for name in ("whole", "whole_on_rank_0") if name not in self.names)
        texts = [
            f"{name} = {text.replace(states.WHOLE_ON_ONE, whole)}"
            for name, text in gathered.items()
        ]
        lines = [f"{whole} = {states.WHOLE_ON_ONE}  # all ranks gather, rank 0 keeps it", *texts]
        before: list[cst.BaseStatement] = [cst.parse_statement(line) for line in lines]
        first, second = split_test(original_node.test) or (None, made.test)
        inner = made.with_changes(test=second, leading_lines=[])
        if first is not None:
            return cst.If(
                test=first,
                body=cst.IndentedBlock([*before, inner]),
                leading_lines=made.leading_lines,
            )
        before[0] = before[0].with_changes(leading_lines=made.leading_lines)
        return cst.FlattenSentinel([*before, inner])

    def visit_With(self, node: cst.With) -> None:
        rows = [
            row for item in node.items for row in self.at(item.item) if row.row == "state_dict_type"
        ]
        if rows:
            self._kinds.append(
                states.kind_of(rows[0].event.node, self.configs) if len(node.items) == 1 else None
            )

    def leave_With(self, original_node: cst.With, updated_node: cst.With) -> Statement:
        item = original_node.items[0].item
        rows = {row.row: row for row in self._with_rows(item)}
        if "state_dict_type" in rows:
            if self._kinds.pop() is not None:
                self.settle(rows["state_dict_type"])
                return joined([], updated_node)
            self.mark(rows["state_dict_type"])
        elif "with no_sync()" in rows:
            made = self._no_sync(original_node, updated_node)
            if made is not None:
                self.settle(rows["with no_sync()"])
                return made
            self.mark(rows["with no_sync()"])
        return self._marked(original_node, updated_node, header=True)

    def _with_rows(self, item: cst.BaseExpression) -> list[Construct]:
        parts = [item.body, item.orelse] if isinstance(item, cst.IfExp) else [item]
        return [row for part in parts for row in self.at(part)]

    def _no_sync(self, original: cst.With, updated: cst.With) -> Statement | None:
        """`with no_sync()` as a switch before each backward; None where a jump would leave the
        switch as it is.
        """
        item = updated.items[0].item
        if len(original.items) != 1 or updated.items[0].asname:
            return None
        if isinstance(item, cst.IfExp):
            syncs = any(
                row.row == "with no_sync()"
                for row in self.at(cst.ensure_type(original.items[0].item, cst.IfExp).orelse)
            )
            quiet, other = (item.orelse, item.body) if syncs else (item.body, item.orelse)
            if not text_of(other).endswith("nullcontext()"):
                return None
            test = item.test if syncs else negated(item.test)
            return joined([switch(quiet, text_of(test))], updated)
        if not plain_body(original.body):
            return None
        return joined([switch(item, "False")], updated, [switch(item, "True")])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Statement:
        small = original_node.body[0]
        if (
            len(original_node.body) == 1
            and isinstance(small, cst.Assign)
            and len(small.targets) == 1
        ):
            target = small.targets[0].target
            for one in [*self.at(small), *self.at(target)]:
                new = updated_node.body[0]
                if (
                    one.row == "require_backward_grad_sync"
                    and isinstance(target, cst.Attribute)
                    and isinstance(new, cst.Assign)
                ):
                    owner, value = (text_of(node) for node in (target.value, new.value))
                    self.settle(one)
                    made = cst.ensure_type(
                        cst.parse_statement(f"{owner}.set_requires_gradient_sync({value})"),
                        cst.SimpleStatementLine,
                    )
                    updated_node = updated_node.with_changes(body=made.body)
        made_line = self._marked(original_node, updated_node)
        here = self.device_line and self.place(original_node).start.line == self.device_line
        if here and isinstance(made_line, cst.SimpleStatementLine):
            self.imports.add(("os", ""))
            chosen = (
                "if torch.cuda.is_available():\n   "
                ' torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))\n'
            )
            return cst.FlattenSentinel([made_line, cst.parse_statement(chosen)])
        return made_line

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> Statement:
        return self._marked(original_node, updated_node, header=True)

    def leave_While(self, original_node: cst.While, updated_node: cst.While) -> Statement:
        return self._marked(original_node, updated_node, header=True)

    def leave_Try(self, original_node: cst.Try, updated_node: cst.Try) -> Statement:
        return self._marked(original_node, updated_node, header=True)

    def _marked(
        self, original: cst.BaseStatement, updated: cst.BaseStatement, header: bool = False
    ) -> Statement:
        """The statement with the marks of its lines above it."""
        place = self.place(original)
        own = [one for one in self._unplaced if place.start.line <= one.line <= place.end.line]
        if not own:
            return updated
        self._unplaced = [one for one in self._unplaced if one not in own]
        lines = [
            cst.EmptyLine(comment=cst.Comment(comment(one)))
            for one in sorted(own, key=lambda one: one.line)
        ]
        leading: Sequence[cst.EmptyLine] = getattr(updated, "leading_lines", ())
        return updated.with_changes(leading_lines=[*leading, *lines])


def comment(one: Todo) -> str:
    """The mark of a construct."""
    return f"# fsdp2: todo[{one.rule}] {one.construct}: {one.text}"
