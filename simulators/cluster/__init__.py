"""The simulated cluster: node types, and the conditions that a run meets."""
