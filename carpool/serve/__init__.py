"""What a model answers: text, conversations, perplexity, with its experts spread over ranks."""
