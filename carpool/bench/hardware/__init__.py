"""What `carpool doctor --measure` measures: links, rates, kernels; `measure_machine.py` writes them."""
