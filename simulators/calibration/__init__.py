"""Calibration: fits the simulator's constants to recordings, and measures the error of its predictions."""
