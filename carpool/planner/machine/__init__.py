"""What can the machine do?

hardware.py   rates of links and of matrix products, by the device's name
work.py       how long kinds of kernels take: latency, operations, bytes
cost.py       how long rides, matrix products and replicas of one layer take on that hardware
"""
