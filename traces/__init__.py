"""Recordings: schemas, storage, exchange logs, importers of public recordings, and systems that answer from them."""
