"""How does the model come onto these ranks? Built, with its rides, its loss and its optimizer."""
