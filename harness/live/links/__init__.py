"""Links of the nodes of a live job that runs on one machine, as a scenario has them."""
