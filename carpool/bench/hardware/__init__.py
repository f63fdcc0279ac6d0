"""What `carpool doctor --measure` measures: links (`links.py`) and computation (`rates.py`); `measure.py` writes it."""
