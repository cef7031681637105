"""How transfers share the links between workers and servers."""
