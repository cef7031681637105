"""`joint`: our own tuner, which tunes every free knob by one rule."""

from tuners.joint.tuner import joint

__all__ = ["joint"]
