"""Reconfigurations in simulated time: their plan, their progress and their cost."""
