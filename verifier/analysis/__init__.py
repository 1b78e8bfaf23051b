"""From traces to facts: pure functions, no file is read."""
