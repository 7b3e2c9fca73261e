"""What runs once per node beside the ranks: it starts them, listens for their signs of life, and ends them."""
