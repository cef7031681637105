"""Rivals that let workers take several local steps between a pull and its push."""
