"""How a run is ended from within. Imports no torch: a script may want to import it itself, after its own settings."""


class StopRun(BaseException):
    """Raised inside the script at the optimizer step after the last one asked for."""
