"""How is all that lies between two rides computed? Attention, documents in one row, compiled layers."""
