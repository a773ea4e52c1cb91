"""Where and when actions run: on a virtual clock, on CPU threads, or as sleeps of modelled length."""
