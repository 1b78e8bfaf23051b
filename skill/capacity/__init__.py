"""Plans of specs, scaffolds and scripts: what is rehearsed, and which settings are compared."""
