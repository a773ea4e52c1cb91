"""What is measured on the engine: layer times, rates of the machine, calibration, the load of other programs."""
