"""A server of a live job: blocks of the model, their optimizer, and the pushes that wait for their commit."""
