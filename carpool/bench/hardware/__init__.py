"""What `carpool doctor --measure` measures: links, rates, kernels, one file each; `measure_machine.py` writes them."""
