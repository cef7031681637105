"""Compiled programs that later processes read, and the code that they depend on."""
