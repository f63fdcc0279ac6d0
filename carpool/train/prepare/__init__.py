"""What is a run before there is a model? Checked, decided, and shown by a dry run."""
