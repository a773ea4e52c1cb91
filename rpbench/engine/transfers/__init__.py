"""What moves tensors between host and devices: paced links, handlers of LOAD, STORE, SEND and their like."""
