"""The verifier inside other tools."""
