"""The running job as `joint` sees it."""
