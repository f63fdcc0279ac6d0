"""What does a run write and show? The files of its folder, and the terminal."""
