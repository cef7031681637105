"""Training the synchronisation policy of RLP on drawn instances of simulated jobs."""
