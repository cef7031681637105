"""What a live job tells of its nodes."""

__all__ = ["events", "history"]


def events(windows):
    """The nodes and what has happened to them, as windows tell it."""
    return [(e.node, e.event) for w in windows for e in w.events]


def history(live):
    """The events of a job's status, as one text."""
    return " | ".join(what for _, what in live.job_status().events)
