"""What does Carpool choose for a run? Each choice is recorded, and taken again when the run is resumed."""
