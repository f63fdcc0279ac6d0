"""Expert replicas: filling spare slots from homes, returning gradients to homes, and moving homes."""
