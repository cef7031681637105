"""Search on a running job: trials, searchers, epochs, and the rate of progress that compares trials."""
