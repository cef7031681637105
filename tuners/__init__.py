"""Tuners of parameter servers, the contract they speak, and the synchronisation policies they install."""
