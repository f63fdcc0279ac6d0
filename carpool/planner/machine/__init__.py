"""What can the machine do?

hardware.py   rates of links and of kernels, by the device's name
cost.py       how long rides and matrix products of one layer take on that hardware
"""
