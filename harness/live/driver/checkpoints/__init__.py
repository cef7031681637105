"""What a live job begins from, and goes back to."""
