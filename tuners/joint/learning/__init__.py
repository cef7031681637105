"""How hot the job is trained, by what its model has learned."""
