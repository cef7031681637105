"""What is predicted of machines, and what is known of the model that learns."""
