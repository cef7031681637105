"""Workloads: the demand of a job on the hardware, and the JAX model that it trains."""
