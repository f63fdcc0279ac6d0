"""How slots get their experts: filling, spare slots for each step, gradients sent home, and moving experts."""
