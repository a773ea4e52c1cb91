"""Schedule x costs -> Timeline, without tensors. Times are floats or, for exact results, Fractions."""
