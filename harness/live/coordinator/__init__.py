"""The coordinator of a live job: the one log that orders everything, and the policy that says who goes on."""
