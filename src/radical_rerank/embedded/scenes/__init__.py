"""A generated world of simple scenes, the model trained on it, and how both are made."""
