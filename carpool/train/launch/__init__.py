"""One process per device: who starts them, what they are told, and what is said when one fails."""
