"""What all commands do with the terminal: read their options, show progress, and bear an output that has gone."""
