"""Rivals of 2018 to 2026 that adapt resources, work per worker, or which workers a round waits for: one file each."""
