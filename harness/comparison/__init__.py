"""A comparison: many runs in parallel processes, and the folder of results that they leave."""
