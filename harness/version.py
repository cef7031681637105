"""The version of the program, in a module of its own: everything else may import it without importing `harness` itself."""

__all__ = ["HARNESS_VERSION"]

HARNESS_VERSION = "0.1.0"
