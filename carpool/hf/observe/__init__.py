"""What happened? Numbers of rides, the Trainer's logs, recorded choices."""
