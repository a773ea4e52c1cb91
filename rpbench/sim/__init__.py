"""Schedule x costs -> Timeline, without tensors. Times may be floats or, for exact results, Fractions."""
