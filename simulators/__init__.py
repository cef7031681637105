"""What would happen: node profiles, workloads, network, engine, control plane."""
