"""Which model is it? Its source, shapes, operations and adapters, before it is built."""
