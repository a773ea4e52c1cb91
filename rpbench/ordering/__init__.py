"""Helpers of schedule generators: orders under given times, repeated orders, orders that do not wait."""
