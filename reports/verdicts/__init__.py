"""Which tuner leads, how sure that is, and in which words it is said."""
