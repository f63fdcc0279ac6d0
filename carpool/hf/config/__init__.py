"""What does the configuration of a model say?"""
