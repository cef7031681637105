"""Baselines for the papers' tuners: fixed settings and policies, random search and generic search."""
