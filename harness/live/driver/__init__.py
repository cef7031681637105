"""The driver of a live job: a System that carries out what a tuner asks on real processes."""
