"""Expert replicas: filling slots from homes, returning gradients to homes, and moving homes."""
