"""Ends a run from within. Imports no torch: the script imports it, after its own settings."""


class StopRun(BaseException):
    """Raised inside the script at the optimizer step after the last requested one."""
