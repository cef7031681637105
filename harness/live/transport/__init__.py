"""How frames travel between the processes of a live job."""
