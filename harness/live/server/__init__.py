"""A server of a live job: it holds blocks of the model, steps their optimizer and stages pushes until their commit."""
