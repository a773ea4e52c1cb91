"""The search over meshes: all plans as arrays, closed forms of their seconds and bytes, what fits, what is best."""
