"""The log of a live job, and what it says of blocks: copies, and moves."""
