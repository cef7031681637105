"""Whether the simulated world is the real one: predictions, live runs and replays beside what was recorded."""
