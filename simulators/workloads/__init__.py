"""Workloads: what a job asks of the hardware, and the JAX model that it learns."""
