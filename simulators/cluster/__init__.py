"""The simulated cluster: node types, and the conditions of a run (noise, stragglers, failures, replayed traces)."""
