"""What is kept between forward and backward, where do experts wait, and how much is that?"""
