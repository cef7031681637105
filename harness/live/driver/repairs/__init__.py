"""What a live job does about losses, slow links and standstill."""
