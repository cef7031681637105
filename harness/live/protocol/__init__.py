"""What the processes of a live job say to each other: messages, the log, their form as bytes."""
