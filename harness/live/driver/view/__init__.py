"""What is known of a live job: branches, pushes, events."""
