"""The processes of a live job: who is a member, and the views that repair a loss."""
