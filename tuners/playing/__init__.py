"""What plays a tuner: its next action within a limit of time, and what every system does with an action."""
