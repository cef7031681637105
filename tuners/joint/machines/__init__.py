"""Which machine does what, by predicted seconds per push."""
