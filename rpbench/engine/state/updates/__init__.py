"""The optimizer's step: whole or by parts, with late gradients, with scaled losses, and taken back."""
