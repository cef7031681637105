"""The command `harness`: one module per group of commands."""
