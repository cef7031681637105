"""Recordings: schemas, storage, exchange logs and, later, importers and replay."""
