"""Calibration: the simulator's constants fitted to recordings, and how far its predictions are off."""
