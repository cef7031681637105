"""The live backend: an elastic parameter server in real processes, which tuners drive as they drive the simulator."""

__all__: list[str] = []
