"""What trains, if it is not everything? Adapters, experts that are frozen or quantised."""
