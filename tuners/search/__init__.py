"""Search on a running job: trials, searchers, and how fast a job learns."""
