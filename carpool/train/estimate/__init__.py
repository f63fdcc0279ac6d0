"""How much memory will a rank need, and does the run fit?"""
