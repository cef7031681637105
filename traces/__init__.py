"""Recordings: schemas, storage, exchange logs, importers of public recordings, and a system that replays recorded runs."""
