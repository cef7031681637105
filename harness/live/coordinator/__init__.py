"""The coordinator of a live job: it orders all changes in one log, runs the policy and handles losses."""
