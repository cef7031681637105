"""Comparisons: many runs in parallel processes, and the results folder that they write."""
