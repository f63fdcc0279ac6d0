"""One process per device, and on which machine: who starts them, what they are told and tell each other, what is said
when one fails."""
