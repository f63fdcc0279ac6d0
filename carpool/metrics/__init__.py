"""What happens: traffic, times and load, counted while layers run."""
