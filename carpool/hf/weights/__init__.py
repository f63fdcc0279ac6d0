"""How do weights get in and out? Files of a checkpoint, names and shapes in them, random values."""
