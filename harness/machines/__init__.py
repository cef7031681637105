"""What runs are played on: this machine, the machines of a Ray cluster, and the compiled programs that are kept there."""
