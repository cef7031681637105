"""One job deployed: brought up, driven by its tuner to the end, recorded and compared with its simulation."""
