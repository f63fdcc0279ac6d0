"""How is computed what lies between two rides? Attention, documents in one row, compiled layers."""
