"""What calibration reads of a recording: one row per run and setting."""
