"""The processes of a live job: how they are placed, started, watched and ended."""
