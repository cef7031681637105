"""The messages between the processes of a live job, the log, and their form as bytes."""
