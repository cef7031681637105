"""The branches of a live job, and the mini-batches that their workers are at."""
