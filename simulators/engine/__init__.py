"""The engine: one compiled step advances the cluster to the next completed push."""
