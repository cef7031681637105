"""The live backend: an elastic parameter server in processes of its own, that tuners drive as they drive the simulator."""

__all__: list[str] = []
