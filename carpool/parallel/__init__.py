"""Over which ranks: filling slots from homes, and how the gradient of each parameter is reduced."""
