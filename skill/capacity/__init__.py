"""Plans of specs, scaffolds and scripts: what is tried, and which settings are compared."""
