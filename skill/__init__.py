"""From intent to code: spec -> scaffold, and the command line."""
