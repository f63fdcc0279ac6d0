"""What balances, changes, fixes or shows what routers choose?"""
